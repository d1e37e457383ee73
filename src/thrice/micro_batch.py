"""micro_batch = "auto": the largest that fits and pays, for a global batch that stays what it is.

What fits is rehearsed; what pays is measured, a forward and backward of each candidate for a moment. Any choice is
the same training to rounding, so a measurement that is off costs speed and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from thrice.compose import compose, default_device, refuse
from thrice.data.cache import cache_folder
from thrice.data.corpus import corpus_of
from thrice.data.tokens import survey
from thrice.errors import ConfigError, Infeasible
from thrice.job_file import load_job
from thrice.observe.rehearse import rehearse
from thrice.runtime import memory
from thrice.runtime.stopwatch import seconds
from thrice.spec.job import Job
from thrice.techniques.vocabulary_loss import VocabularyLoss

FREE_SHARE = 0.85
"""Of the memory that is free now: the rest is for the allocator's rounding, kernels' scratch and the data."""
PAYS = 1.02
"""A larger micro-batch has to be this many times as fast; less is noise."""
LONG_S = 5.0
"""A micro-batch that takes longer than this is large enough to keep any device busy; no larger one is tried."""


def settled(job: Job, *, saved: str | None = None, measure: bool = True, say: Callable[[str], None] = print) -> Job:
    """The job with its `micro_batch` chosen, and says how; the job itself where nothing is open.

    `saved` is the job file of a run that goes on: what was chosen for it stays, the vocabulary loss's `auto` (which
    is chosen when the job is composed) included. Without `measure` nothing real is run, and the largest that fits
    is taken. Raises ConfigError where no candidate is legal, Infeasible where not even the smallest fits.
    """
    if saved is not None:
        job = _as_saved(job, load_job(saved))
    if job.micro_batch != "auto":
        return job
    jobs = [replace(job, micro_batch=size) for size in candidates(job)]
    refused = [list(refuse(one)) for one in jobs]
    legal = [one for one, problems in zip(jobs, refused, strict=True) if not problems]
    if not legal:
        raise ConfigError(refused[-1])
    found = survey(job.tokenizer, corpus_of(job.data).documents, cache_folder())
    if found.tokens is not None:  # no micro-batch is larger than all the samples there are
        samples = found.tokens // job.sequence
        legal = [one for one in legal if one.ledger().micro_batch <= samples] or legal[:1]
    vocabulary = found.vocabulary
    free_bytes = memory.free_bytes(default_device())
    fitting = _fitting(legal, vocabulary, int(free_bytes * FREE_SHARE))
    if len(legal) == 1 and any(refused):
        keys = {problem.key: None for problems in refused for problem in problems}
        chosen, how = legal[0], f"the only one that goes with {' and '.join(keys)}"
    elif not measure or len(fitting) == 1:
        chosen, how = fitting[-1], "the largest that fits" if len(fitting) > 1 else "the only one that fits"
    else:
        chosen, how = _fastest(fitting, vocabulary)
    more = f"; {legal[len(fitting)].micro_batch} would not fit" if len(fitting) < len(legal) else ""
    say(f"micro_batch auto: {chosen.micro_batch}, {how}{more} ({memory.shown(free_bytes)} are free)")
    return chosen


def _as_saved(job: Job, saved: Job) -> Job:
    chosen = {part.name: part for part in saved.techniques if isinstance(part, VocabularyLoss)}
    is_open = {part.name for part in job.techniques if isinstance(part, VocabularyLoss) and part.mode == "auto"}
    return replace(
        job,
        micro_batch=saved.ledger().micro_batch if job.micro_batch == "auto" else job.micro_batch,
        techniques=tuple(chosen.get(part.name, part) if part.name in is_open else part for part in job.techniques),
    )


def candidates(job: Job) -> list[int]:
    """The sizes that divide what each device gets of a step (of each size of it, where the batch grows), ascending."""
    assert job.global_batch is not None, "checked"
    ramp = job.batch_ramp
    whole = math.gcd(job.global_batch, ramp.start or 0, ramp.increment or 0) // job.mesh().data_parallel
    return [size for size in range(1, whole + 1) if whole % size == 0]


def _fitting(jobs: Sequence[Job], vocabulary: int, limit_bytes: int) -> list[Job]:
    """The first of `jobs`, ascending, whose step fits. Memory grows with the micro-batch, so it can be bisected."""
    low, high = 0, len(jobs)  # jobs[:low] fit, jobs[high:] do not
    reason = Infeasible()
    while low < high:
        middle = (low + high) // 2
        try:
            needed_bytes = rehearse(jobs[middle], vocabulary).peak_bytes
            fits = needed_bytes <= limit_bytes
            reason = Infeasible(
                f"a step takes {memory.shown(needed_bytes)} of tensors by rehearsal, and {memory.shown(limit_bytes)} "
                'can be used\n    → recompute = "full", precision = "bf16", a shorter sequence or a smaller model'
            )
        except Infeasible as error:  # a budget that is below what this size needs at least
            fits, reason = False, error
        low, high = (middle + 1, high) if fits else (low, middle)
    if not low:
        raise Infeasible(f'micro_batch = "auto": not even {jobs[0].micro_batch} fits: {reason}')
    return list(jobs[:low])


def _fastest(jobs: Sequence[Job], vocabulary: int) -> tuple[Job, str]:
    """The smallest of those that are as fast as any, and the measurements in words."""
    rates: dict[int, float] = {}
    best, best_rate, size = jobs[0], 0.0, 0
    for one in jobs:
        last, size = size, one.ledger().micro_batch
        if size < 1.5 * last and one is not jobs[-1]:
            size = last
            continue  # too near to the last to tell apart
        taken_s = _micro_batch_s(one, vocabulary)
        rates[size] = size / taken_s
        if rates[size] > PAYS * best_rate:
            best, best_rate = one, rates[size]
        if taken_s > LONG_S or rates[size] < 0.8 * best_rate:
            break
    shown = ", ".join(f"{size}: {rate:.3g}" for size, rate in rates.items())
    return best, f"the largest that pays; samples/s of forward and backward at {shown}"


def _micro_batch_s(job: Job, vocabulary: int) -> float:
    """Seconds of one forward and backward; the random state stays as it is."""
    with torch.random.fork_rng():
        session = compose(job, vocabulary=vocabulary)
        batch = session.example()

        def forward_backward() -> None:
            torch.autograd.backward(session.loss_sum(batch) / batch.count)

        times = []
        for _ in range(3):  # the first warms up
            times.append(seconds(forward_backward, session.device))
            session.model.zero_grad()
    return min(times[1:])
