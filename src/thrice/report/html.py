"""A comparison as one HTML file that needs nothing else: no network, no font, no script.

The pictures are inline SVG, drawn by the template from what is laid out here: curves thinned to some 300 points that
keep every spike, bars from zero. Each series has a colour of a palette that the colour-blind can tell apart, and a
dash of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
from jinja2 import Environment, StrictUndefined

from thrice.compare import Comparison, Summary, differing
from thrice.curves import Array, Curve, difference, thin
from thrice.report.comparison import FIGURES, PEAK_BYTES, TOKENS_PER_S, VALIDATION_LOSS, Figure, notes, verdicts
from thrice.spec.dump import dump

COLOURS = 8
"""Of the palette in the template."""
DASHES = ("", "7 4", "2 4", "10 4 2 4")
"""Where two lines lie on each other, the gaps of the upper one show the lower."""

POINTS = 300
"""Of one curve."""
ALL_POINTS = 12_000
"""Of all curves of a picture, so that no number of runs makes the file large."""

WIDTH, HEIGHT = 640.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 12.0, 12.0, 44.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """A path of a chart, in the units of its view box."""

    series: int
    points: str
    thin: bool


@dataclass(frozen=True, kw_only=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    band: tuple[float, float] | None
    """(top, height) of what another seed changes."""
    described: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    series: int
    label: str
    width: float
    """Share of the widest, 0 to 1; 0 where there is no figure."""
    low: float
    high: float
    """The range over the seeds, as shares."""
    text: str


def page(comparison: Comparison) -> str:
    """The whole file."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = resources.files("thrice.report").joinpath("compare.html.j2").read_text(encoding="utf-8")
    jobs = [variant.job for variant in comparison.experiment.variants]
    varied = differing([dump(job) for job in jobs])
    return environment.from_string(template).render(
        name=comparison.experiment.name,
        over=comparison.experiment.over,
        seeds=comparison.experiment.seeds,
        labels=[summary.variant for summary in comparison.summaries],
        summaries=comparison.summaries,
        dashes=[DASHES[(series + series // COLOURS) % len(DASHES)] for series in range(len(comparison.summaries))],
        figures=FIGURES,
        loss=loss_chart(comparison),
        apart=difference_chart(comparison),
        bars=[(figure, bars(figure, comparison.summaries)) for figure in (VALIDATION_LOSS, TOKENS_PER_S, PEAK_BYTES)],
        varied={key: ["–" if each is None else each for each in values] for key, values in varied.items()},
        job=dump(jobs[0]),
        machine=comparison.machine,
        notes=list(notes(comparison)),
        verdicts=verdicts(comparison),
        width=WIDTH,
        height=HEIGHT,
        plot=(LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM),
        colours=COLOURS,
    )


def loss_chart(comparison: Comparison) -> Chart:
    """The smoothed training loss of every run, and with one seed the loss itself behind it."""
    over = comparison.experiment.over
    curves = [(series, run.measured.curve) for series, s in enumerate(comparison.summaries) for run in s.runs]
    drawn: list[tuple[int, Array, Array, bool]] = []
    if comparison.experiment.seeds == 1:
        drawn += [(series, _x(curve, over), curve.loss, True) for series, curve in curves]
    drawn += [(series, *curve.over(over), False) for series, curve in curves]
    return _chart(drawn, None, f"Training loss in nats per token over {over}, smoothed, one line for each run.")


def difference_chart(comparison: Comparison) -> Chart | None:
    """The smoothed loss of each run less that of the baseline's run with its seed; None where there is no pair."""
    over = comparison.experiment.over
    first, *others = comparison.summaries
    baseline = {run.seed: run.measured.curve for run in first.runs if run.error is None}
    drawn: list[tuple[int, Array, Array, bool]] = [
        (series, *difference(run.measured.curve, baseline[run.seed], over), False)
        for series, summary in enumerate(others, start=1)
        for run in summary.runs
        if run.seed in baseline
    ]
    of_seeds = next((s.verdict.seeds_gap for s in others if s.verdict is not None), None)
    band = of_seeds.mean if of_seeds is not None else None
    described = f"Smoothed training loss of each variant less the baseline's with the same seed, over {over}."
    if not any(len(x) for _, x, _, _ in drawn):
        return None
    return _chart(drawn, band, described, zero=True)


def _x(curve: Curve, over: str) -> Array:
    return curve.steps if over == "steps" else curve.tokens


def _chart(
    drawn: Sequence[tuple[int, Array, Array, bool]], band: float | None, described: str, *, zero: bool = False
) -> Chart:
    points = max(20, min(POINTS, ALL_POINTS // max(1, len(drawn))))
    thinned = [(series, *thin(x, y, points), behind) for series, x, y, behind in drawn if len(x)]
    x_low, x_high = _range(np.concatenate([x for _, x, _, _ in thinned]) if thinned else np.zeros(1))
    values = [y for _, _, y, _ in thinned] + ([np.array([-band, band])] if band else [])
    y_low, y_high = _range(np.concatenate([*values, np.zeros(1 if zero or not values else 0)]))

    def across(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    return Chart(
        lines=[
            Line(
                series=series,
                points=" ".join(f"{across(a):.1f},{down(b):.1f}" for a, b in zip(x, y, strict=True)),
                thin=behind,
            )
            for series, x, y, behind in thinned
        ],
        x_ticks=[Tick(at=across(value), text=_short(value)) for value in ticks(x_low, x_high)],
        y_ticks=[Tick(at=down(value), text=_short(value)) for value in ticks(y_low, y_high)],
        band=(down(band), down(-band) - down(band)) if band else None,
        described=described,
    )


def _range(values: Array) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if low == high:
        margin = abs(low) * 0.05 or 1e-6
        return low - margin, high + margin
    return low, high


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


def bars(figure: Figure, summaries: Iterable[Summary]) -> list[Bar]:
    """One for each variant, from zero."""
    summaries = list(summaries)
    spreads = [figure.of(summary) for summary in summaries]
    widest = max((s.mean + s.half_range for s in spreads if s is not None), default=0.0) or 1.0
    return [
        Bar(
            series=series,
            label=summary.variant,
            width=spread.mean / widest if spread else 0.0,
            low=(spread.mean - spread.half_range) / widest if spread else 0.0,
            high=(spread.mean + spread.half_range) / widest if spread else 0.0,
            text=figure.cell(summary),
        )
        for series, (summary, spread) in enumerate(zip(summaries, spreads, strict=True))
    ]
