"""A plain float32 loop against each technique alone and against the best stack: tokens/s and peak bytes, as ratios.

The plain loop is what a careful person writes first: the same model and batch, torch's AdamW as it comes, one clip,
no technique. Each technique runs beside it in one process, step by step in turn (ABBA), so that a machine whose
speed drifts slows both alike. Peaks are of processes of their own: what the system says was resident at the most in
a step, less what was resident before it, and the tensors that were there. Last, one step of the plain loop and one
of the best stack are profiled: which share is matrix products, attention, loss, norms, optimizer, copies?

    python benchmarks/stack.py               # 30M and 100M; about 60 minutes on two cores; writes stack.json
    python benchmarks/stack.py 30M           # one of them: its part of stack.json
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from machine import described
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from thrice.compose import build_model, compose
from thrice.data.batches import Batch
from thrice.optim.build import parameter_groups
from thrice.runtime.technique import Technique
from thrice.spec.job import Decoder, Job, Optimizer
from thrice.step import train_step
from thrice.techniques.attention import Attention
from thrice.techniques.compile import Compile
from thrice.techniques.optimizer_in_backward import OptimizerInBackward
from thrice.techniques.optimizer_states import OptimizerStates
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import Recompute
from thrice.techniques.vocabulary_loss import VocabularyLoss

MODELS = {
    "30M": (Decoder(layers=10, hidden=384, heads=6, vocabulary=32_000), 512, 4, 2),
    "100M": (Decoder(layers=12, hidden=768, heads=12, vocabulary=32_000), 256, 2, 1),
    "100M, 2,048 tokens": (Decoder(layers=12, hidden=768, heads=12, vocabulary=32_000), 512, 4, 0),
}
"""Name -> (model, tokens per sample, samples per step, how often plain, stack, stack, plain are timed; 0 is for peaks
alone)."""

SMALLEST_PEAK = (
    Precision(mode="bf16"),
    Recompute(strategy="full"),
    VocabularyLoss(mode="chunked"),
    OptimizerStates(format="8bit"),
    OptimizerInBackward(enabled=True),
)
STACKS: dict[str, tuple[Technique, ...]] = {
    "thrice, no technique": (),
    "attention eager": (Attention(kernel="eager"),),
    "attention flash (readable reference)": (Attention(kernel="flash"),),
    "vocabulary_loss chunked": (VocabularyLoss(mode="chunked"),),
    "precision bf16": (Precision(mode="bf16"),),
    "precision bf16-pure": (Precision(mode="bf16-pure"),),
    "recompute selective": (Recompute(strategy="selective"),),
    "recompute full": (Recompute(strategy="full"),),
    "optimizer_states bf16": (OptimizerStates(format="bf16"),),
    "optimizer_states 8bit": (OptimizerStates(format="8bit"),),
    "optimizer_in_backward": (OptimizerInBackward(enabled=True),),
    "compile": (Compile(mode="blocks"),),
    "micro_batch 1": (),
    "fastest stack": (VocabularyLoss(mode="chunked"), Compile(mode="blocks")),
    "smallest stack": tuple(part for part in SMALLEST_PEAK if part.name != "precision"),
    "fastest stack where bf16 is fast": (
        Precision(mode="bf16"),
        VocabularyLoss(mode="chunked"),
        Compile(mode="blocks"),
    ),
}


def job_for(model: str, name: str) -> Job:
    decoder, sequence, batch, _ = MODELS[model]
    clip = None if any(part.name == "optimizer_in_backward" for part in STACKS[name]) else 1.0
    return Job(
        sequence=sequence,
        global_batch=batch,
        micro_batch=1 if name == "micro_batch 1" else batch,
        max_steps=100,
        lr=1e-4,
        decoder=decoder,
        optimizer=Optimizer(clip=clip),
        techniques=STACKS[name],
    )


def windows(job: Job) -> Callable[[], list[Batch]]:
    """Windows of random tokens, other ones each time."""
    ledger, generator = job.ledger(), torch.Generator().manual_seed(0)
    vocabulary = job.decoder.vocabulary or 256

    def window() -> list[Batch]:
        tokens = torch.randint(vocabulary, (ledger.global_batch, ledger.sequence + 1), generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return [
            Batch.of(inputs[start : start + ledger.micro_batch], targets[start : start + ledger.micro_batch], (0,))
            for start in range(0, ledger.global_batch, ledger.micro_batch)
        ]

    return window


def plain_step(job: Job) -> Callable[[], None]:
    """The loop that knows no technique."""
    plain = replace(job, techniques=(), micro_batch=job.global_batch)
    model = build_model(plain, 256, torch.device("cpu")).train()
    groups = [{**group, "params": [p for _, p in group["params"]]} for group in parameter_groups(model, 0.1)]
    optimizer = torch.optim.AdamW(groups, lr=job.lr, betas=job.optimizer.betas)
    window = windows(plain)

    def step() -> None:
        for batch in window():
            logits = model(batch.inputs)
            F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_of(model: str, name: str) -> Callable[[], object]:
    if name == "plain":
        return plain_step(job_for(model, "thrice, no technique"))
    job = job_for(model, name)
    session, window = compose(job, vocabulary=256), windows(job)
    return lambda: train_step(session, window())


def time_ratio(model: str, name: str) -> dict[str, object]:
    """Tokens/s of the stack over those of the plain loop."""
    sides = {"plain": step_of(model, "plain"), "stack": step_of(model, name)}
    for step in sides.values():  # states are made, kernels compiled
        step()
    spent: dict[str, list[float]] = {side: [] for side in sides}
    ratios = []
    for pair in range(2 * MODELS[model][3]):
        for side in ("plain", "stack") if pair % 2 == 0 else ("stack", "plain"):
            began = time.perf_counter()
            sides[side]()
            spent[side].append(time.perf_counter() - began)
        if pair % 2:
            ratios.append(sum(spent["plain"][-2:]) / sum(spent["stack"][-2:]))
    tokens = job_for(model, "plain" if name == "plain" else name).ledger().tokens_per_step
    return {
        "speed_ratio": round(median(ratios), 3),
        "speed_ratio_least_most": [round(min(ratios), 3), round(max(ratios), 3)],
        "tokens_per_s": round(tokens / median(spent["stack"])),
    }


def peak_bytes(model: str, name: str) -> int:
    """Of a step, in a process of its own."""
    command = [sys.executable, __file__, "--peak", model, name]
    # freed memory goes back at once, so that what is resident is what is in use
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()[-1])


def report_peak(model: str, name: str) -> None:
    """Resident at the most in a second step, less what the process was before it had a model."""
    torch.zeros(1).add_(1)
    gc.collect()
    before = _status("VmRSS")
    step = step_of(model, name)
    step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    step()
    print(_status("VmHWM") - before)


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


KINDS = {
    "matrix products": r"aten::(mm|addmm|addmm_|bmm|baddbmm|matmul|linear)$|mkldnn|graph_\d+_cpp_fused.*mm",
    "attention": r"scaled_dot_product|thrice::flash|softmax$(?<!log_softmax)",
    "loss": r"log_softmax|nll_loss|cross_entropy|logsumexp|ChunkedCrossEntropy",
    "norms and other elementwise": r"aten::(rms_norm|mul|mul_|add|add_|sub|sub_|div|div_|pow|rsqrt|mean|sum|neg|silu"
    r"|silu_backward|exp|exp_)$|cpp_fused",
    "optimizer": r"adam|sgd|linalg_vector_norm|_foreach",
    "copies, casts and fills": r"aten::(copy_|_to_copy|clone|contiguous|cat|fill_|zero_|slice|index|embedding.*|to)$",
}


def shares(model: str, name: str) -> dict[str, float]:
    """Share of a step's time by kind of operator, from torch's profiler: its own time, not that of what it calls."""
    step = step_of(model, name)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    found = dict.fromkeys([*KINDS, "other"], 0.0)
    for event in profiled.key_averages():
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, event.key)), "other")
        found[kind] += event.self_cpu_time_total
    total = sum(found.values())
    return {kind: round(spent / total, 3) for kind, spent in found.items()}


def measure(model: str) -> dict[str, object]:
    job = job_for(model, "thrice, no technique")
    parameters = sum(p.numel() for p in build_model(job, 256, torch.device("cpu")).parameters())
    plain_peak = peak_bytes(model, "plain")
    rows = []
    for name in STACKS:
        peak = peak_bytes(model, name)
        speed = time_ratio(model, name) if MODELS[model][3] else {}
        row = {"stack": name, **speed, "peak_bytes": peak, "peak_ratio": round(plain_peak / peak, 3)}
        rows.append(row)
        print(model, json.dumps(row), flush=True)
        gc.collect()
    profiles = {name: shares(model, name) for name in ("plain", "thrice, no technique", "vocabulary_loss chunked")}
    print(model, json.dumps(profiles), flush=True)
    return {
        "parameters": parameters,
        "tokens_per_step": job.ledger().tokens_per_step,
        "plain_peak_bytes": plain_peak,
        "stacks": rows,
        "profile_shares": profiles,
    }


def main() -> None:
    if sys.argv[1:2] == ["--peak"]:
        report_peak(*sys.argv[2:])
        return
    path = Path(__file__).with_suffix(".json")
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for model in sys.argv[1:] or MODELS:
        results[model] = {**described(), **measure(model)}
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
