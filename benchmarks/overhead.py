"""What thrice's training loop costs over a minimal hand-written one with the same operations.

Both train the same model on the same windows in one process, step by step in turn (ABBA), so that a machine whose
speed drifts slows both alike. The hand-written loop has no metrics file, no log line and no checks; thrice's is the
one that `thrice train` runs. Their weights are compared at the end: equal bits, or the comparison is void.

    python benchmarks/overhead.py            # about five minutes; writes overhead.json beside this file
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from machine import described
from torch import nn
from torch.nn import functional as F

import thrice
from thrice.compose import build_model, compose
from thrice.data.batches import Position
from thrice.data.load import Data
from thrice.optim.build import parameter_groups
from thrice.optim.schedules import learning_rate
from thrice.run_folder import RunFolder
from thrice.spec.dump import dump
from thrice.spec.job import Decoder, Job
from thrice.train import Run

CASES = {
    "tiny": (Decoder(layers=2, hidden=64, heads=4), 128, 4, 200),
    "30M": (Decoder(layers=8, hidden=512, heads=8, mlp_hidden=1536), 256, 2, 16),
}
"""Name -> (model, tokens per sample, micro_batch, pairs of steps); two micro-batches a step."""


def hand_written(job: Job, data: Data) -> tuple[nn.Module, Callable[[], None]]:
    """The loop that a careful person writes: accumulation by tokens, fused AdamW, one clip, a cosine schedule."""
    model = build_model(job, data.tokenizer.vocabulary, torch.device("cpu")).train()
    named = parameter_groups(model, job.optimizer.weight_decay)
    groups = [{**group, "params": [p for _, p in group["params"]]} for group in named]
    optimizer = torch.optim.AdamW(groups, lr=job.lr, betas=job.optimizer.betas, eps=job.optimizer.eps, fused=True)
    parameters = list(model.parameters())
    position, steps = Position(), 0
    lr_at = learning_rate(job)

    def step() -> None:
        nonlocal position, steps
        window, position = data.window(position)
        count = sum(batch.count for batch in window)
        total = 0.0
        for batch in window:
            logits = model(batch.inputs)
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten(), reduction="sum")
            (loss / count).backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(parameters, job.optimizer.clip or float("inf")).item()
        for group in optimizer.param_groups:
            group["lr"] = lr_at(steps, 0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1

    return model, step


def measure(name: str, folder: str) -> dict[str, object]:
    decoder, sequence, micro_batch, pairs = CASES[name]
    job = Job(
        sequence=sequence,
        micro_batch=micro_batch,
        grad_accum_steps=2,
        max_steps=2 * pairs + 2,
        lr=1e-3,
        decoder=decoder,
        run_dir=str(Path(folder) / name),
    )
    data = thrice.load_data(job)
    model, hand_step = hand_written(job, data)
    session = compose(job, vocabulary=data.tokenizer.vocabulary, device=torch.device("cpu"))
    ratios, ours, theirs = [], [], []
    run_folder = RunFolder(job.run_dir, resume=False)
    with run_folder.opened(dump(job), 0):
        run = Run(session=session, data=data, folder=run_folder, say=lambda line: None, total=job.steps())
        run.advance()
        hand_step()
        for pair in range(2 * pairs):
            order = (run.advance, hand_step) if pair % 2 == 0 else (hand_step, run.advance)
            times = {step: _timed(step) for step in order}
            ours.append(times[run.advance])
            theirs.append(times[hand_step])
            if pair % 2:  # both orders: what the first leaves in the caches is charged to each once
                ratios.append(sum(ours[-2:]) / sum(theirs[-2:]))
    equal = all(torch.equal(a, b) for a, b in zip(session.model.parameters(), model.parameters(), strict=True))
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_step": job.ledger().tokens_per_step,
        "pairs": len(ratios),
        "ratio_median": round(median(ratios), 4),
        "ratio_quartiles": [round(sorted(ratios)[len(ratios) * q // 4], 4) for q in (1, 3)],
        "thrice_step_s_median": round(median(ours), 5),
        "hand_written_step_s_median": round(median(theirs), 5),
        "same_weights_bitwise": equal,
    }


def _timed(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(name, folder) for name in sys.argv[1:] or CASES]
    for row in rows:
        print(json.dumps(row))
    result = {**described(), "rows": rows}
    if not sys.argv[1:]:
        Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
