"""A comparison in words and figures: what its table, its JSON and its page say alike."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thrice.compare import Comparison, Run, Summary
from thrice.curves import Spread
from thrice.experiment import Experiment
from thrice.runtime import memory
from thrice.spec.dump import dump

NONE = "–"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A column of the table: one figure of each variant."""

    name: str
    """The field of Summary."""
    title: str
    unit: str
    relative: bool
    """Beside the baseline's as a ratio; as a difference otherwise."""

    def of(self, summary: Summary) -> Spread | None:
        spread: Spread | None = getattr(summary, self.name)
        return spread

    def shown(self, value: float) -> str:
        if self.unit == "bytes":
            return memory.shown(value)
        return f"{value:,.0f}" if self.unit == "tokens/s" else f"{value:.4f}"

    def cell(self, summary: Summary) -> str:
        """The mean, and half the range over the seeds where there are several."""
        spread = self.of(summary)
        if spread is None:
            return NONE
        several = sum(run.error is None for run in summary.runs) > 1
        return self.shown(spread.mean) + (f" ± {self.shown(spread.half_range)}" if several else "")

    def beside(self, summary: Summary, baseline: Summary) -> str:
        """To the baseline: a ratio or a difference."""
        own, first = self.of(summary), self.of(baseline)
        if own is None or first is None or summary is baseline:
            return NONE
        if not self.relative:
            return f"{own.mean - first.mean:+z.4f}"
        return f"{own.mean / first.mean:.2f}×" if first.mean else NONE


FINAL_LOSS = Figure(name="final_loss", title="training loss", unit="nats/token", relative=False)
VALIDATION_LOSS = Figure(name="validation_loss", title="validation loss", unit="nats/token", relative=False)
TOKENS_PER_S = Figure(name="tokens_per_s", title="tokens/s", unit="tokens/s", relative=True)
PEAK_BYTES = Figure(name="peak_bytes", title="peak bytes", unit="bytes", relative=True)
FIGURES = (FINAL_LOSS, VALIDATION_LOSS, TOKENS_PER_S, PEAK_BYTES)


def notes(comparison: Comparison) -> Iterator[str]:
    """What a reader has to know to read the figures."""
    experiment = comparison.experiment
    yield (
        "training loss: mean of the last 5% of the steps; tokens/s: median of the steps without the first; peak bytes: "
        "of the whole process on a CPU, Python and torch included"
    )
    yield f"beside each figure: against the baseline, {comparison.summaries[0].variant}"
    if experiment.seeds > 1:
        yield f"mean ± half the range over {experiment.seeds} seeds"
    if experiment.over == "tokens":
        yield "the variants' steps are not alike (batch, sequence or length varies): curves are compared over tokens"
    if len({(variant.job.data, variant.job.tokenizer) for variant in experiment.variants}) > 1:
        yield "the variants do not read the same tokens: their losses are not of the same text"
    for label, reason in experiment.refused:
        yield f"left out: {label}: {reason}"


def verdicts(comparison: Comparison) -> list[tuple[str, str, str]]:
    """(variant, judgement, sentence), of the baseline too where it failed."""
    said: list[tuple[str, str, str]] = []
    for summary in comparison.summaries:
        failed = [run for run in summary.runs if run.error is not None]
        if summary.verdict is not None:
            said.append((summary.variant, summary.verdict.judgement, summary.verdict.sentence))
        elif failed:
            said.append((summary.variant, "failed", "; ".join(f"seed {run.seed}: {run.failure}" for run in failed)))
    return said


def comparison_table(comparison: Comparison, file: TextIO | None = None) -> None:
    """The table and what has to be said with it."""
    baseline = comparison.summaries[0]
    table = Table(title=f"{escape(comparison.experiment.name)}: {len(comparison.summaries)} variants")
    table.add_column("variant", overflow="fold")
    for figure in FIGURES:
        table.add_column(figure.title, justify="right")
        table.add_column("", justify="right")
    table.add_column("skipped", justify="right")
    for summary in comparison.summaries:
        cells = [text for figure in FIGURES for text in (figure.cell(summary), figure.beside(summary, baseline))]
        table.add_row(escape(summary.variant), *cells, str(summary.skipped_steps))
    # a pipe has no width: wide enough that no figure is broken
    console = Console(file=file, width=None if (file or sys.stdout).isatty() else 180)
    console.print(table)
    for note in notes(comparison):
        console.print(f"  {note}", markup=False, highlight=False)
    for variant, judgement, sentence in verdicts(comparison):
        console.print(f"{variant}: {judgement.upper()}\n  {sentence}", markup=False, highlight=False)


def plan_lines(experiment: Experiment) -> Iterator[str]:
    """What would be run."""
    for variant, job, job_file in experiment.runs():
        yield f"{variant.label} · seed {job.seed} → {job_file.with_suffix('')}"
    for label, reason in experiment.refused:
        yield f"left out: {label}: {reason}"
    yield "nothing was started"


def plan_dict(experiment: Experiment) -> dict[str, Any]:
    return {
        "runs": [
            {"variant": variant.label, "seed": job.seed, "run_dir": job.run_dir}
            for variant, job, _ in experiment.runs()
        ],
        "refused": _refused(experiment),
    }


def comparison_dict(comparison: Comparison) -> dict[str, Any]:
    """Everything but the steps, which are in each run's metrics.jsonl."""
    experiment = comparison.experiment
    return {
        "name": experiment.name,
        "machine": comparison.machine,
        "seeds": experiment.seeds,
        "compared_over": experiment.over,
        "baseline": comparison.summaries[0].variant,
        "notes": list(notes(comparison)),
        "refused": _refused(experiment),
        "variants": [
            {
                "variant": variant.label,
                "job": dump(variant.job),
                **{figure.name: _spread(figure.of(summary)) for figure in FIGURES},
                "skipped_steps": summary.skipped_steps,
                "verdict": asdict(summary.verdict) if summary.verdict is not None else None,
                "runs": [_run(run) for run in summary.runs],
            }
            for variant, summary in zip(experiment.variants, comparison.summaries, strict=True)
        ],
    }


def _refused(experiment: Experiment) -> list[dict[str, str]]:
    return [{"variant": label, "why": reason} for label, reason in experiment.refused]


def _spread(spread: Spread | None) -> dict[str, float] | None:
    return asdict(spread) if spread is not None else None


def _run(run: Run) -> dict[str, Any]:
    measured = run.measured
    return {
        "seed": run.seed,
        "run_dir": str(run.folder),
        "exit_code": run.exit_code,
        "error": run.error,
        "steps": len(measured.curve.steps),
        **{figure.name: getattr(measured, figure.name) for figure in FIGURES},
        "skipped_steps": measured.skipped_steps,
    }
