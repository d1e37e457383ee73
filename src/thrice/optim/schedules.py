"""The learning rate as a function of how far the run is."""

from __future__ import annotations

import math
from collections.abc import Callable

from thrice.spec.job import Job, Schedule


def learning_rate(job: Job) -> Callable[[int, int], float]:
    """(steps taken, samples of them) -> the rate of the next step.

    The schedule counts steps; where the batch grows, samples, so that the many small steps of its beginning are
    not a large part of it. The peak follows the batch of the moment where lr scaling is on, applied once.
    """
    schedule, ledger, total_steps = job.schedule, job.ledger(), job.steps()
    total = total_steps if ledger.ramp is None else ledger.samples_after(total_steps)
    if ledger.ramp is None:
        warmup = schedule.warmup_steps or -(-(schedule.warmup_samples or 0) // ledger.global_batch)
    else:
        warmup = schedule.warmup_samples or ledger.samples_after(schedule.warmup_steps)
    decay = total * (schedule.decay_steps or max(1, total_steps // 10)) // total_steps

    def rate(steps: int, samples: int) -> float:
        batch = ledger.global_batch_at(samples)
        done, unit = (steps, 1) if ledger.ramp is None else (samples, batch)
        return job.peak_lr(batch) * share(done, schedule, warmup=warmup, decay=decay, total=total, unit=unit)

    return rate


def share(done: int, schedule: Schedule, *, warmup: int, decay: int, total: int, unit: int = 1) -> float:
    """The rate as a share of the peak, `done` of `total` steps (or samples, `unit` of them a step) behind.

    Warm-up rises in equal parts to the peak, so that the first step is not lost to a rate of 0; then comes the
    decay, from the peak to min_lr_ratio × peak over what is left, or in `wsd` over the last `decay`.
    """
    if done < warmup:
        return min(1.0, (done + unit) / warmup)
    begin = max(warmup, total - decay) if schedule.decay == "wsd" else warmup
    behind = min(1.0, max(0, done - begin) / max(1, total - begin))
    match schedule.decay:
        case "cosine":
            left = 0.5 * (1 + math.cos(math.pi * behind))
        case "linear" | "wsd":
            left = 1 - behind
        case "constant":
            return 1.0
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * left
