"""What the tests of whole runs share: a tiny job, what a run leaves behind, and children that can be killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import thrice.train
from thrice.runtime import store
from thrice.spec.job import Checkpoint, Decoder, Evaluation, Job, Schedule

TIMINGS = ("tokens_per_s", "peak_bytes")
"""The fields of a metrics row that no two runs share."""


def tiny(corpus: Path, run_dir: Path, **changes) -> Job:
    """Two layers on 283 samples of 32 bytes: 6 steps of 48 samples make an epoch, the last of 43."""
    job = Job(
        data=(str(corpus),),
        sequence=32,
        global_batch=48,
        micro_batch=24,
        max_steps=8,
        lr=3e-3,
        seed=5,
        run_dir=str(run_dir),
        log_every=1,
        decoder=Decoder(layers=2, hidden=32, heads=2, dropout=0.1),
        schedule=Schedule(warmup_steps=3),
        checkpoint=Checkpoint(keep_last=2),
        evaluation=Evaluation(every_steps=3, max_samples=2),
    )
    return replace(job, **changes)


def run(job: Job, **options) -> list[str]:
    """Trains to the end; the lines that were said."""
    lines: list[str] = []
    thrice.train.train(job, say=lines.append, **options)
    return lines


def stop_after(step: int, number: signal.Signals = signal.SIGINT) -> Callable[[str], None]:
    """A `say` that sends the signal while the line of that step is printed."""

    def say(line: str) -> None:
        if line.split()[:1] == [str(step)] and "validation" not in line:
            signal.raise_signal(number)

    return say


def metrics(run_dir: Path) -> list[dict[str, object]]:
    """The rows of metrics.jsonl, without what depends on the clock."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMINGS} for row in rows]


def saved_steps(run_dir: Path) -> list[int]:
    names = [path.name.removeprefix("step-") for path in (run_dir / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdigit())


def assert_same_state(got: Path, expected: Path, step: int) -> None:
    """The checkpoints of two runs agree to the last bit: weights, optimizer, random state, scaler, position."""
    ours, theirs = (store.load(folder / "checkpoints" / f"step-{step:08d}") for folder in (got, expected))
    for group in theirs[0].keys() | ours[0].keys():
        assert ours[0][group].keys() == theirs[0][group].keys()
        for name, tensor in theirs[0][group].items():
            same = torch.equal(_bits(ours[0][group][name]), _bits(tensor))
            assert same, f"{group} {name} differs"
    for key in ("progress", "scaler", "corpus", "metrics_rows"):
        assert ours[1][key] == theirs[1][key], key


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def forked(act: Callable[[], int | None], output: Path) -> int:
    """The process id of a child that runs `act` and exits with what it returns; its output goes to a file.

    A fork and not a new interpreter: importing torch takes longer than all that the child does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's idle threads; the child uses one thread
        pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        code = act() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def exit_code(pid: int) -> int:
    """What the child exited with, or the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
