"""Explains a run that failed for want of memory: bytes by category, and what would make it fit."""

from __future__ import annotations

import errno
import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import TypeVar

import torch

from thrice.compose import default_device, refuse
from thrice.data.cache import cache_folder
from thrice.data.corpus import corpus_of
from thrice.data.tokens import survey
from thrice.errors import OutOfMemory, ThriceError
from thrice.observe.rehearse import rehearse
from thrice.runtime import memory
from thrice.spec.job import Job
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import Recompute

T = TypeVar("T")

ALLOCATOR_MESSAGES = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, numpy or the interpreter could not get memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error) for message in ALLOCATOR_MESSAGES)


def explained(job: Job, act: Callable[[], T], *, resuming: bool = False) -> T:
    """What `act` returns; where it runs out of memory, OutOfMemory with its reason and what would fit.

    `resuming` says that the run goes on from a checkpoint, whose precision cannot change.
    """
    try:
        return act()
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        reason = _reason(error)
    # not above, nor in a context manager: there the error still holds the failed step's frames, and they its
    # tensors; here they are gone, and a rehearsal has room
    gc.collect()
    raise out_of_memory(job, reason, resuming=resuming)


def _reason(error: BaseException) -> str:
    wanted = re.search(r"allocate (\d+) bytes", str(error))
    if wanted:
        return f"{memory.shown(int(wanted[1]))} more could not be had"
    return str(error).strip().partition("\n")[0] or type(error).__name__


def out_of_memory(job: Job, reason: str, *, resuming: bool = False) -> OutOfMemory:
    """The error for a job that ran out: planned bytes beside what the process used, and three ranked fixes."""
    used, limit = memory.used_of(default_device())
    lines = [
        f"out of memory: {reason}",
        f"  used      {memory.shown(used)} at the most, of {memory.shown(limit)}, by the whole process",
    ]
    try:
        vocabulary = survey(job.tokenizer, corpus_of(job.data).documents, cache_folder()).vocabulary
        planned = rehearse(job, vocabulary)
        needed_bytes = planned.peak_bytes
        lines.append(
            f"  planned   {memory.shown(needed_bytes)} of tensors for one step: {by_category(planned.at_peak)}"
        )
        fixes = ranked_fixes(job, vocabulary, needed_bytes, resuming=resuming)[:3]
        if fixes:
            lines.append("  the same training in less, by rehearsal (smallest first); add one of these:")
            lines += [f"    {memory.shown(needed):>10}  {flags}" for flags, needed in fixes]
        else:
            lines.append("  no technique of this version needs less; a smaller model or sequence does")
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        lines.append("  not even a rehearsal has room; `thrice train --dry-run` elsewhere says what it needs")
    return OutOfMemory("\n".join(lines))


def ranked_fixes(job: Job, vocabulary: int, now_bytes: int, *, resuming: bool = False) -> list[tuple[str, int]]:
    """(flags to add, rehearsed peak bytes), the smallest first; only what is legal and needs less than now."""
    rehearsed = []
    for flags, other in _alternatives(job):
        if resuming and "--precision" in flags:
            continue
        try:
            if not any(refuse(other)):
                rehearsed.append((flags, rehearse(other, vocabulary).peak_bytes))
        except ThriceError:
            continue  # a model that the technique cannot read is no fix
    return sorted(((f, needed) for f, needed in rehearsed if needed < now_bytes), key=lambda fix: fix[1])


def _alternatives(job: Job) -> Iterator[tuple[str, Job]]:
    batch = job.ledger().global_batch
    smaller = replace(job, micro_batch=1, grad_accum_steps=batch, global_batch=batch)
    cut = "--micro_batch 1"
    cut += f" --global_batch {batch}" if job.global_batch is None else ""
    cut += f" --grad_accum_steps {batch}" if job.grad_accum_steps is not None else ""
    full, bf16, pure = Recompute(strategy="full"), Precision(mode="bf16"), Precision(mode="bf16-pure")
    if job.ledger().micro_batch > 1:
        yield cut, smaller
        yield f"{cut} {_flags(job, full)}", _with(smaller, full)
    yield _flags(job, full), _with(job, full)
    yield _flags(job, bf16), _with(job, bf16)
    yield _flags(job, pure), _with(job, pure)
    yield f"{_flags(job, pure)} {_flags(job, full)}", _with(_with(job, full), pure)


def _flags(job: Job, technique: Precision | Recompute) -> str:
    """The flags that make the job's technique into this one, whatever more its table says."""
    first, *others = (field.name for field in fields(technique))
    flags = [f"--{technique.name} {getattr(technique, first)}"]
    for old in job.techniques:
        if old.name == technique.name:
            flags += [f"--{old.name}.{key} none" for key in others if getattr(old, key) is not None]
    return " ".join(flags)


def _with(job: Job, technique: Precision | Recompute) -> Job:
    others = tuple(other for other in job.techniques if other.name != technique.name)
    return replace(job, techniques=(*others, technique))


def by_category(bytes_: dict[str, int]) -> str:
    return ", ".join(f"{name} {memory.shown(count)}" for name, count in bytes_.items() if count)
