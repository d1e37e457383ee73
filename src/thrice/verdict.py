"""Whether a variant trains as the baseline does: their gap beside what another seed changes in the baseline itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from thrice.curves import Gap, Measured, mean_gap, spread, widest_gap

Judgement = Literal["same", "within", "differs", "no yardstick", "failed"]

ONE_SEED = "one seed gives no yardstick: run with --seeds 3 to see whether that is more than another seed changes"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Losses in nats per token; None where there is nothing to compare."""

    judgement: Judgement
    sentence: str
    gap: Gap | None = None
    """Between the variant and the baseline with the same seed: the mean over the seeds."""
    seeds_gap: Gap | None = None
    """The widest between two seeds of the baseline."""
    validation_gap: float | None = None
    """The variant's validation loss less the baseline's, each the mean over its seeds."""
    seeds_validation_gap: float | None = None
    """The largest validation loss of the baseline's seeds less the smallest."""


def judge(
    variant: Mapping[int, Measured], baseline: Mapping[int, Measured], over: str, failures: Sequence[str] = ()
) -> Verdict:
    """The verdict on the runs of a variant, by seed, against those of the baseline that finished.

    `over` is what the curves are laid over, "steps" or "tokens". `failures` say why runs of the variant stopped;
    those are compared as far as they went, and the judgement is "failed". A variant is "within" what seeds change
    where its mean gap, its largest gap and its validation gap each are no wider than between two seeds.
    """
    gap = mean_gap([(run.curve, baseline[seed].curve) for seed, run in variant.items() if seed in baseline], over)
    of_seeds = widest_gap([run.curve for run in baseline.values()], over)
    ours, theirs = (spread([run.validation_loss for run in runs.values()]) for runs in (variant, baseline))
    validation = ours.mean - theirs.mean if ours and theirs else None
    of_validation = 2 * theirs.half_range if theirs and len(baseline) > 1 else None
    judgement, sentence = _judged(variant, baseline, gap, of_seeds, validation, of_validation)
    if failures:
        judgement = "failed"
        sentence = f"{len(failures)} of {len(variant)} runs failed: " + "; ".join(dict.fromkeys(failures))
        sentence += f" · as far as it went: {_figures(gap, of_seeds, None, None)}" if gap else ""
    return Verdict(
        judgement=judgement,
        sentence=sentence,
        gap=gap,
        seeds_gap=of_seeds,
        validation_gap=validation,
        seeds_validation_gap=of_validation,
    )


def _judged(
    variant: Mapping[int, Measured],
    baseline: Mapping[int, Measured],
    gap: Gap | None,
    of_seeds: Gap | None,
    validation: float | None,
    of_validation: float | None,
) -> tuple[Judgement, str]:
    if not baseline:
        return "no yardstick", "no run of the baseline finished, so there is nothing to compare with"
    if gap is None:
        return "no yardstick", "the curves have no step in common"
    figures = _figures(gap, of_seeds, validation, of_validation)
    if all(_equal(run, baseline.get(seed)) for seed, run in variant.items()):
        return "same", "the same loss in every step, to the last digit"
    if of_seeds is None:
        return "no yardstick", f"{figures}; {ONE_SEED}"
    beyond = list(_beyond(gap, of_seeds, validation, of_validation))
    if beyond:
        return "differs", f"differs by more than seeds do, in {' and '.join(beyond)}: {figures}"
    return "within", f"within what another seed changes: {figures}"


def _equal(run: Measured, other: Measured | None) -> bool:
    return (
        other is not None
        and np.array_equal(run.curve.steps, other.curve.steps)
        and np.array_equal(run.curve.loss, other.curve.loss)
        and run.validation_loss == other.validation_loss
    )


def _beyond(gap: Gap, of_seeds: Gap, validation: float | None, of_validation: float | None) -> Iterator[str]:
    if gap.mean > of_seeds.mean:
        yield "the mean gap"
    if gap.largest > of_seeds.largest:
        yield "the largest gap"
    if validation is not None and of_validation is not None and abs(validation) > of_validation:
        yield "the validation loss"


def _figures(gap: Gap, of_seeds: Gap | None, validation: float | None, of_validation: float | None) -> str:
    def beside(value: str, seeds: float | None) -> str:
        return value if seeds is None else f"{value} (seeds {seeds:.4f})"

    parts = [
        "mean gap " + beside(f"{gap.mean:.4f}", of_seeds.mean if of_seeds else None),
        "largest " + beside(f"{gap.largest:.4f}", of_seeds.largest if of_seeds else None),
    ]
    if validation is not None:
        parts.append("validation " + beside(f"{validation:+z.4f}", of_validation))
    return ", ".join(parts)
