"""The learning rate as a function of optimizer steps taken."""

from __future__ import annotations

import math

from thrice.spec.job import Schedule


def lr_at(step: int, *, peak: float, schedule: Schedule, total_steps: int) -> float:
    """The rate of the step that follows `step` taken ones.

    Warm-up goes from peak/warmup_steps to the peak, so that the first step is not lost to a rate of 0; then
    the decay goes from the peak to min_lr_ratio × peak over what is left of `total_steps`.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    decay_steps = max(1, total_steps - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / decay_steps)
    match schedule.decay:
        case "cosine":
            share = 0.5 * (1 + math.cos(math.pi * done))
        case "linear":
            share = 1 - done
        case "constant":
            return peak
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * share)
