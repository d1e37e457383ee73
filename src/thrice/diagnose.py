"""Explains a run that failed for want of memory: bytes by category, and what would make it fit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from thrice.compose import default_device, refuse
from thrice.data.cache import cache_folder
from thrice.data.corpus import corpus_of
from thrice.data.tokens import survey
from thrice.errors import OutOfMemory, ThriceError
from thrice.observe.rehearse import rehearse
from thrice.observe.trace import Trace
from thrice.runtime import memory
from thrice.spec.job import Job
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import Recompute

ALLOCATOR_MESSAGES = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, numpy or the interpreter could not get memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(m in str(error) for m in ALLOCATOR_MESSAGES)


@contextmanager
def explained(job: Job) -> Iterator[None]:
    """Turns running out of memory inside into OutOfMemory, with its reason and what would fit."""
    try:
        yield
        return
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
    # out here the failed step's frames, and the tensors they hold, are gone: a rehearsal has room
    gc.collect()
    vocabulary = survey(job.tokenizer, corpus_of(job.data).documents, cache_folder()).vocabulary
    raise out_of_memory(job, vocabulary, reason)


def out_of_memory(job: Job, vocabulary: int, reason: str) -> OutOfMemory:
    """The error for a job that ran out: planned bytes beside what the process used, and three ranked fixes."""
    device = default_device()
    lines = [
        f"out of memory: {reason}",
        f"  used at the most {memory.shown(memory.peak_bytes(device))} of "
        f"{memory.shown(memory.limit_bytes(device))} by the whole process",
    ]
    try:
        trace = rehearse(job, vocabulary).trace
        lines += [f"  one step needs {memory.shown(trace.peak_bytes)} of tensors: {by_category(trace)}"]
        lines += ["  what needs less, the model and the algorithm unchanged:"]
        for change, needed in ranked_fixes(job, vocabulary)[:3]:
            lines += [f"    {memory.shown(needed):>10}  {change}"]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        lines += ["  not even a rehearsal has room; `thrice train --dry-run` elsewhere says what it needs"]
    return OutOfMemory("\n".join(lines))


def ranked_fixes(job: Job, vocabulary: int) -> list[tuple[str, int]]:
    """(what to change, rehearsed peak bytes), the smallest first; only what needs less than the job as it is."""
    now = rehearse(job, vocabulary).trace.peak_bytes
    rehearsed = []
    for change, other in _alternatives(job):
        try:
            if not any(refuse(other)):
                rehearsed.append((change, rehearse(other, vocabulary).trace.peak_bytes))
        except ThriceError:
            continue  # a model that the technique cannot read is no fix
    return sorted(((c, needed) for c, needed in rehearsed if needed < now), key=lambda fix: fix[1])


def _alternatives(job: Job) -> Iterator[tuple[str, Job]]:
    ledger = job.ledger()
    smaller = replace(job, micro_batch=1, grad_accum_steps=None, global_batch=ledger.global_batch)
    full, pure = Recompute(strategy="full"), Precision(mode="bf16-pure")
    if ledger.micro_batch > 1:
        yield f"--micro_batch 1 (grad_accum_steps becomes {ledger.global_batch})", smaller
    yield "--recompute full", _with(job, full)
    if ledger.micro_batch > 1:
        yield "--micro_batch 1 --recompute full", _with(smaller, full)
    yield "--precision bf16", _with(job, Precision(mode="bf16"))
    yield "--precision bf16-pure", _with(job, pure)
    yield "--precision bf16-pure --recompute full", _with(_with(job, full), pure)


def _with(job: Job, technique: Precision | Recompute) -> Job:
    others = tuple(other for other in job.techniques if other.name != technique.name)
    return replace(job, techniques=(*others, technique))


def by_category(trace: Trace) -> str:
    return ", ".join(f"{name} {memory.shown(count)}" for name, count in trace.at_peak.items() if count)
