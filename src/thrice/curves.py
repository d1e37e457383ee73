"""What a run folder's metrics say: a loss curve and its figures; and how far two loss curves lie apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thrice.run_folder import RunFolder

Array = NDArray[np.float64]

SHARE = 0.05
"""Of a run's steps: the width of the smoothing, and the end that its final loss is the mean of."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The training loss over the optimizer steps that were taken; arrays of one length, float64."""

    steps: Array
    tokens: Array
    """Trained on up to and including the step."""
    loss: Array
    """Nats per token."""

    def over(self, x: str) -> tuple[Array, Array]:
        """(x, smoothed loss); `x` is "steps" or "tokens"."""
        return (self.steps if x == "steps" else self.tokens), smooth(self.loss)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run came to, as far as it went; None where there is no such figure."""

    curve: Curve
    final_loss: float | None
    """Mean over the last 5% of the steps, in nats per token."""
    validation_loss: float | None
    """Of the end of the run."""
    tokens_per_s: float | None
    """Median of the steps, without the first, which warms up."""
    peak_bytes: int | None
    """Of the whole process on a CPU, of tensors on an accelerator."""
    skipped_steps: int


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Between two smoothed loss curves, over what both have run, in nats per token."""

    mean: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over the seeds."""

    mean: float
    half_range: float
    """Half of what lies between the smallest and the largest."""


def measure(run_dir: Path) -> Measured:
    """Reads metrics.jsonl and record.json of a run, finished or not."""
    rows = list(_rows(run_dir / "metrics.jsonl"))
    windows = [row for row in rows if "taken" in row]
    taken = [row for row in windows if row["taken"]]
    curve = Curve(
        steps=np.array([row["step"] for row in taken], dtype=np.float64),
        tokens=np.cumsum(np.array([row["tokens"] for row in taken], dtype=np.float64)),
        loss=np.array([row["loss"] for row in taken], dtype=np.float64),
    )
    outcome = RunFolder(run_dir, resume=True).measured() or {}
    rates = [row["tokens_per_s"] for row in taken[1:]]
    return Measured(
        curve=curve,
        final_loss=float(curve.loss[-_share(len(taken)) :].mean()) if taken else None,
        validation_loss=outcome.get("validation_loss"),
        tokens_per_s=median(rates) if rates else None,
        peak_bytes=outcome.get("peak_bytes"),
        skipped_steps=len(windows) - len(taken),
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the last line of a run that was killed
            return


def _share(steps: int) -> int:
    return max(1, round(SHARE * steps))


def smooth(values: Array) -> Array:
    """The mean over a window of 5% of the values around each; the window is cut at the ends."""
    half = round(SHARE * len(values) / 2)
    total = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values))
    begin, end = np.maximum(place - half, 0), np.minimum(place + half + 1, len(values))
    averaged: Array = (total[end] - total[begin]) / (end - begin)
    return averaged if half else values


def thin(x: Array, y: Array, points: int) -> tuple[Array, Array]:
    """At most `points` of the points: of each stretch the smallest and the largest y, so that no spike is lost."""
    if len(x) <= points:
        return x, y
    kept = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), max(1, (points - 2) // 2)):
        kept |= {int(part[y[part].argmin()]), int(part[y[part].argmax()])}
    chosen = sorted(kept)
    return x[chosen], y[chosen]


def difference(one: Curve, other: Curve, over: str) -> tuple[Array, Array]:
    """(x, smoothed loss of `one` less that of `other`), at the points of both in the range that both have run."""
    (x_one, y_one), (x_other, y_other) = one.over(over), other.over(over)
    if not len(x_one) or not len(x_other):
        return np.empty(0), np.empty(0)
    x = np.union1d(x_one, x_other)
    x = x[(x >= max(x_one[0], x_other[0])) & (x <= min(x_one[-1], x_other[-1]))]
    return x, np.interp(x, x_one, y_one) - np.interp(x, x_other, y_other)


def gap(one: Curve, other: Curve, over: str) -> Gap | None:
    """How far the smoothed curves lie apart; None where they have no range in common."""
    apart = np.abs(difference(one, other, over)[1])
    return Gap(mean=float(apart.mean()), largest=float(apart.max())) if len(apart) else None


def mean_gap(pairs: Sequence[tuple[Curve, Curve]], over: str) -> Gap | None:
    """The mean of the pairs' gaps."""
    gaps = [found for one, other in pairs if (found := gap(one, other, over)) is not None]
    return Gap(mean=mean(g.mean for g in gaps), largest=mean(g.largest for g in gaps)) if gaps else None


def widest_gap(curves: Sequence[Curve], over: str) -> Gap | None:
    """The widest gap between any two of the curves; None for fewer than two."""
    gaps = [found for one, other in combinations(curves, 2) if (found := gap(one, other, over)) is not None]
    return Gap(mean=max(g.mean for g in gaps), largest=max(g.largest for g in gaps)) if gaps else None


def spread(values: Sequence[float | None]) -> Spread | None:
    """Of those that are there; None where there is none."""
    there = [value for value in values if value is not None]
    return Spread(mean=mean(there), half_range=(max(there) - min(there)) / 2) if there else None
