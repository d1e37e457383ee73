"""What the command line shows: a certificate, and what a run would do."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from thrice.certificate import Certificate, Row
from thrice.compose import claim, default_device, refuse
from thrice.data.batches import Windows, split
from thrice.data.cache import cache_folder
from thrice.data.corpus import corpus_of
from thrice.data.tokens import Survey, TokenStore, survey
from thrice.diagnose import by_category
from thrice.errors import ConfigError
from thrice.observe.rehearse import Rehearsal, rehearse
from thrice.run_folder import RunFolder, is_used
from thrice.runtime import memory
from thrice.spec.job import Job
from thrice.train import remarks


def certificate_table(certificate: Certificate) -> None:
    """One line for each kind of quantity: the row that comes nearest to its bound, and the verdict."""
    processes = f" in {certificate.processes} processes" if certificate.processes > 1 else ""
    table = Table(title=f"claim {certificate.claim} · {certificate.steps} steps on {certificate.device}{processes}")
    for column in ("compared", "tensors × steps", "worst deviation", "noise floor", "allowed"):
        table.add_column(column)
    table.add_column("where", overflow="fold")
    table.add_column("")
    for kind in dict.fromkeys(row.kind for row in certificate.rows):
        rows = [row for row in certificate.rows if row.kind == kind]
        worst = max(rows, key=_nearness)
        table.add_row(
            kind,
            str(len(rows)),
            f"{worst.deviation:.2e}",
            f"{worst.floor:.2e}",
            f"{worst.allowed:.2e}",
            f"step {worst.step} {worst.tensor}",
            "ok" if all(row.ok for row in rows) else "DIFFERS",
        )
    # a pipe has no width: wide enough that no tensor's name is broken
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for note in certificate.notes:
        console.print(f"  {note}", markup=False, highlight=False)


def _nearness(row: Row) -> float:
    return row.deviation / row.allowed if row.allowed else row.deviation


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a run would do, found without starting it or writing anything."""

    job: Job
    survey: Survey
    not_text: tuple[Path, ...]
    """Files of the data's folders that are left out."""
    samples: tuple[int, int] | None
    """To train on, and held out; None where the tokens are not counted yet."""
    rehearsal: Rehearsal
    exists: bool
    """Whether the run folder holds something already."""


def dry_run(job: Job) -> DryRun:
    """Surveys the data and rehearses a step on fake tensors. Raises what a real run would raise by then."""
    if problems := list(refuse(job)):
        raise ConfigError(problems)
    corpus = corpus_of(job.data)
    found = survey(job.tokenizer, corpus.documents, cache_folder())
    return DryRun(
        job=job,
        survey=found,
        not_text=corpus.not_text,
        samples=None if found.tokens is None else _samples(job, found.tokens),
        rehearsal=rehearse(job, found.vocabulary),
        exists=is_used(RunFolder(job.run_dir or "runs/run", resume=True).path),
    )


def _samples(job: Job, tokens: int) -> tuple[int, int]:
    """How so many tokens would be split; a run's own code does it, on zeros that take no memory."""
    zeros = TokenStore(tokens=np.zeros(tokens, dtype=np.uint8), documents=1, bytes=tokens, fingerprint="")
    train, validation = split(zeros, job.sequence, job.evaluation.fraction)
    Windows(
        count=len(train),
        global_batch=job.ledger().global_batch,
        seed=job.seed,
        last_window=job.last_window,
    )
    return len(train), len(validation)


def dry_run_lines(dry: DryRun) -> list[str]:
    job, rehearsal, ledger = dry.job, dry.rehearsal, dry.job.ledger()
    tokens = "its tokens are counted when it is tokenised"
    if dry.samples is not None:
        tokens = f"{dry.survey.tokens:,} tokens, {dry.samples[0]:,} samples to train on, {dry.samples[1]:,} held out"
    cached = "tokenised already" if dry.survey.cached else "to be tokenised first, once"
    state = "EXISTS: --resume goes on with it, and without that a run refuses" if dry.exists else "would be made"
    every = job.checkpoint.every_steps
    return [
        f"model      {job.model} · {dry.rehearsal.parameters:,} parameters",
        f"data       {dry.survey.documents:,} documents, {dry.survey.bytes:,} bytes, {tokens} ({cached})",
        *(f"           left out, because it is not text: {path}" for path in dry.not_text[:5]),
        f"batch      {ledger}",
        *(f"{name:<10} {line}" for name, line in dry.rehearsal.applied.items()),
        f"claim      {claim(job).name}: what `thrice verify` holds this run to",
        f"steps      {job.steps():,} · {ledger.samples_after(job.steps()) * job.sequence:,} tokens · checkpoint "
        + (f"every {every} steps and at the end" if every else "at the end"),
        f"memory     {memory.shown(rehearsal.peak_bytes)} of tensors at the peak of a step, by rehearsal: "
        + by_category(rehearsal.at_peak),
        *_too_large(rehearsal.peak_bytes),
        f"compute    {rehearsal.flops / 1e9:,.2f} GFLOP per step",
        *remarks(job, None if dry.samples is None else dry.samples[0]),
        f"run        {job.run_dir} {state}",
        "nothing was started",
    ]


def _too_large(needed_bytes: int) -> Iterator[str]:
    has = memory.total_bytes(default_device())
    if needed_bytes > has:
        yield f"           this machine has {memory.shown(has)}: it would NOT fit here"


def as_json(content: object) -> str:
    """JSON; a number that is not finite, which JSON has no word for, is null."""
    return json.dumps(_finite(content), indent=1)


def _finite(content: object) -> object:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def printable(text: str) -> str:
    """Text that a model wrote, with nothing in it that a terminal would obey."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)


def dry_run_dict(dry: DryRun) -> dict[str, Any]:
    return {
        "parameters": dry.rehearsal.parameters,
        "documents": dry.survey.documents,
        "bytes": dry.survey.bytes,
        "tokens": dry.survey.tokens,
        "samples": dry.samples,
        "not_text": [str(path) for path in dry.not_text],
        "ledger": dry.job.ledger().as_dict(),
        "techniques": dry.rehearsal.applied,
        "claim": claim(dry.job).name,
        "steps": dry.job.steps(),
        "peak_bytes": dry.rehearsal.peak_bytes,
        "at_peak_bytes": dry.rehearsal.at_peak,
        "step_flops": dry.rehearsal.flops,
        "run_dir": dry.job.run_dir,
        "run_dir_exists": dry.exists,
    }
