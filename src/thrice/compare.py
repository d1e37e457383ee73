"""Runs the variants of an experiment and sets them side by side.

Each is trained as `thrice train` would, in a process of its own, so that its peak bytes are its own, one after the
other. Runs of one seed start from the same weights and see the data in the same order, but for what is varied.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from thrice.child import train_in_child
from thrice.curves import Measured, Spread, measure, spread
from thrice.errors import Interrupted, UsageError
from thrice.experiment import Experiment, Variant
from thrice.files import write_whole
from thrice.run_folder import RunFolder, check_writable, is_used, make
from thrice.runtime.interrupt import stoppable
from thrice.spec.dump import dump, settings
from thrice.spec.job import Job
from thrice.verdict import Verdict, judge

Say = Callable[[str], None]


def machine() -> dict[str, object]:
    """What ran it, and when."""
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    accelerator = torch.accelerator.current_accelerator()
    return {
        "cpu": named[1] if named else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "accelerator": str(accelerator) if accelerator else None,
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a variant."""

    variant: str
    seed: int
    folder: Path
    exit_code: int
    """Of `thrice train`; negative for the signal that ended it."""
    error: str | None
    """Why it failed."""
    measured: Measured

    @property
    def failure(self) -> str:
        return f"exit code {self.exit_code}: {self.error}"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A variant over its seeds; the figures are of the runs that finished."""

    variant: str
    runs: tuple[Run, ...]
    verdict: Verdict | None
    """None for the baseline."""
    final_loss: Spread | None
    validation_loss: Spread | None
    tokens_per_s: Spread | None
    peak_bytes: Spread | None
    skipped_steps: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    experiment: Experiment
    summaries: tuple[Summary, ...]
    """In the experiment's order; the first is the baseline."""
    machine: dict[str, object] = field(default_factory=machine)

    def failed(self) -> list[Run]:
        return [run for summary in self.summaries for run in summary.runs if run.error is not None]


def run(experiment: Experiment, *, resume: bool = False, say: Say = print) -> Comparison:
    """Trains every variant with every seed; progress goes to `say`, a line at a time. A run that fails stops no other.

    Raises UsageError before anything is run where the folder is used: with `resume` runs that are finished there
    are reused and others go on, but none that was begun with another job. Raises Interrupted after SIGINT or
    SIGTERM, with the run that was going on saved.
    """
    planned = list(experiment.runs())
    _check_folders(experiment, planned, resume)
    make(experiment.out, "--out")
    runs: list[Run] = []
    with stoppable():
        try:
            for number, (variant, job, job_file) in enumerate(planned, start=1):
                prefix = f"[{number}/{len(planned)}] {variant.label} · seed {job.seed}"
                runs.append(_run(variant, job, job_file, prefix, resume=resume, say=say))
        except (Interrupted, KeyboardInterrupt) as error:
            raise Interrupted(
                f"interrupted: {len(runs)} of {len(planned)} runs are done and kept in {experiment.out}\n"
                "  --resume goes on from there",
                error.exit_code if isinstance(error, Interrupted) else 130,
            ) from None
    return summed_up(experiment, runs)


def _check_folders(experiment: Experiment, planned: Sequence[tuple[Variant, Job, Path]], resume: bool) -> None:
    if not resume and is_used(experiment.out, "--out"):
        raise UsageError(
            f"{experiment.out} is not empty, and nothing in it is overwritten\n"
            "  --resume reuses the runs that are there; another --out keeps both"
        )
    check_writable(experiment.out, "--out")
    for _, job, job_file in planned:
        check_writable(Path(job.run_dir or ""), "--out")
        begun = job_file.read_text(encoding="utf-8") if job_file.is_file() else None
        if begun is None and is_used(Path(job.run_dir or ""), "--out"):
            raise UsageError(f"{job.run_dir} is not empty, and no run of this comparison\n  name another --out")
        if begun is not None and begun != dump(job):
            changed = ", ".join(differing([begun, dump(job)]))
            raise UsageError(f"{job.run_dir} was begun with another job (other: {changed})\n  name another --out")


def _run(variant: Variant, job: Job, job_file: Path, prefix: str, *, resume: bool, say: Say) -> Run:
    folder = Path(job.run_dir or "")
    code, error = 0, None
    if RunFolder(folder, resume=True).measured() is not None:
        say(f"{prefix} · finished before, reused")
    else:
        write_whole(job_file, dump(job))
        log = job_file.with_suffix(".log")
        code, error = train_in_child(job_file, log, resume=resume, say=lambda line: say(f"{prefix} │{line}"))
        say(f"{prefix} · " + (f"FAILED, exit code {code}: {error}" if error else "done"))
    return Run(
        variant=variant.label, seed=job.seed, folder=folder, exit_code=code, error=error, measured=measure(folder)
    )


def summed_up(experiment: Experiment, runs: Sequence[Run]) -> Comparison:
    """The figures of each variant, and the verdict on it."""
    first = experiment.variants[0].label
    baseline = {run.seed: run.measured for run in runs if run.variant == first and run.error is None}
    summaries = []
    for variant in experiment.variants:
        own = [run for run in runs if run.variant == variant.label]
        done = [run.measured for run in own if run.error is None]
        failures = [run.failure for run in own if run.error is not None]
        measured = {run.seed: run.measured for run in own}
        summaries.append(
            Summary(
                variant=variant.label,
                runs=tuple(own),
                verdict=None if variant.label == first else judge(measured, baseline, experiment.over, failures),
                final_loss=spread([each.final_loss for each in done]),
                validation_loss=spread([each.validation_loss for each in done]),
                tokens_per_s=spread([each.tokens_per_s for each in done]),
                peak_bytes=spread([each.peak_bytes for each in done]),
                skipped_steps=sum(each.skipped_steps for each in done),
            )
        )
    return Comparison(experiment=experiment, summaries=tuple(summaries))


def differing(jobs: Sequence[str]) -> dict[str, list[str | None]]:
    """{dotted key: its value as TOML in each dumped job} where they are not all alike, None where it is not given."""
    flat = [settings(job) for job in jobs]
    keys = dict.fromkeys(key for job in flat for key in job)
    values = {key: [job.get(key) for job in flat] for key in keys}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}
