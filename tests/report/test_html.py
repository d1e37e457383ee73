"""The page of a comparison: well-formed, self-contained, small, and safe whatever the names in it."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from thrice.compare import Comparison, Run, summed_up
from thrice.curves import Curve, Measured
from thrice.experiment import Experiment, Variant
from thrice.report.comparison import FINAL_LOSS, comparison_table
from thrice.report.html import page, ticks
from thrice.spec.job import Job

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Checker(HTMLParser):
    """Fails on a tag that is not closed in its turn; keeps text and ids."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{self.getpos()}: {tag}"

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.seen if tag == name]


def measured(steps: int, seed: int, offset: float) -> Measured:
    place = np.arange(1.0, steps + 1)
    loss = 1.5 + 4 * np.exp(-place / steps * 5) + np.random.default_rng(seed).normal(size=steps) * 0.05 + offset
    return Measured(
        curve=Curve(steps=place, tokens=place * 4096, loss=loss),
        final_loss=float(loss[-10:].mean()) if steps else None,
        validation_loss=1.9 + offset,
        tokens_per_s=5000.0 - 100 * seed,
        peak_bytes=400 * 2**20,
        skipped_steps=seed,
    )


def comparison(
    labels: list[str], *, steps: int = 100, seeds: int = 1, failing: tuple[str, ...] = (), reached: int = 7
) -> Comparison:
    jobs = [Job(global_batch=8, max_steps=steps, lr=1e-3 * (1 + i)) for i in range(len(labels))]
    experiment = Experiment(
        name="made up",
        out=Path("runs/out"),
        variants=tuple(Variant(label=label, job=job) for label, job in zip(labels, jobs, strict=True)),
        refused=(("lr=7", "lr = 7: <too> large"),),
        seeds=seeds,
    )
    runs = []
    for number, label in enumerate(labels):
        for seed in range(seeds):
            failed = label in failing
            runs.append(
                Run(
                    variant=label,
                    seed=seed,
                    folder=Path("runs/out"),
                    exit_code=6 if failed else 0,
                    error="out of memory: 1 GiB more could not be had" if failed else None,
                    measured=measured(reached if failed else steps, seed, 0.01 * number),
                )
            )
    return summed_up(experiment, runs)


def test_well_formed_with_tables_beside_pictures() -> None:
    made = comparison(["lr=0.001", "lr=0.002", "lr=0.003"], seeds=3, failing=("lr=0.003",))
    parsed = Checker(page(made))
    pictures = [svg for svg in parsed.tags("svg") if svg.get("role") == "img"]
    assert len(pictures) == 5, "loss, difference, validation loss, tokens/s, peak bytes"
    ids = [attributes["id"] for _, attributes in parsed.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    for picture in pictures:
        assert set((picture["aria-labelledby"] or "").split()) <= set(ids), "title and desc"
    assert len(parsed.tags("figure")) == 5
    assert len(parsed.tags("table")) == 3 + 5, "figures, verdicts, jobs, and one beside each picture"
    text = " ".join(parsed.text)
    for label in ("lr=0.001", "lr=0.002", "lr=0.003"):
        assert text.count(label) > 5
    assert "3 of 3 runs failed: exit code 6: out of memory: 1 GiB more could not be had" in text
    assert "mean ± half the range over 3 seeds" in text
    assert "lr = 7: <too> large" in text
    jobs = text[text.index("What differs between the jobs") : text.index("The job of lr=0.001")]
    assert " ".join(jobs.split()) == (
        "What differs between the jobs variant lr lr=0.001 0.001 lr=0.002 0.002 lr=0.003 0.003"
    )


def test_nothing_from_outside() -> None:
    text = page(comparison(["a=1", "a=2"]))
    assert "http" not in text
    assert "<script" not in text
    assert not re.search(r"url\(|@import|@font-face|src=|href=", text)
    assert "prefers-color-scheme: dark" in text


def test_a_failure_of_several_lines_keeps_them() -> None:
    made = comparison(["a=1", "a=2"], failing=("a=2",))
    (run,) = made.summaries[1].runs
    again = summed_up(made.experiment, [*made.summaries[0].runs, replace(run, error="1 problem\n  a = 2: too much")])
    shown = page(again)
    assert "exit code 6: 1 problem\n  a = 2: too much" in shown
    assert ".left td:last-child { white-space: pre-line; }" in shown
    out = io.StringIO()
    comparison_table(again, out)
    assert "exit code 6: 1 problem\n  a = 2: too much" in out.getvalue()


def test_a_difference_that_rounds_to_nothing_has_no_minus() -> None:
    made = comparison(["a=1", "a=2"])
    first, second = made.summaries
    assert first.final_loss is not None
    less = replace(second, final_loss=replace(first.final_loss, mean=first.final_loss.mean - 1e-6))
    assert FINAL_LOSS.beside(less, first) == "+0.0000"


def test_names_are_text_and_not_markup() -> None:
    evil = 'data=</svg><script>alert("x")</script>&'
    parsed = Checker(page(comparison([evil, "data=b"])))
    assert parsed.tags("script") == []
    assert evil in " ".join(parsed.text)


def test_long_runs_make_no_large_file() -> None:
    """8 variants × 3 seeds × 20,000 steps, and more lines than anyone looks at."""
    few = page(comparison([f"lr={i}" for i in range(8)], steps=20_000, seeds=3))
    assert len(few.encode()) < 500_000
    many = page(comparison([f"lr={i}" for i in range(40)], steps=2_000, seeds=5))
    assert len(many.encode()) < 500_000
    lines = Checker(few).tags("polyline")
    assert all(len((line["points"] or "").split()) <= 300 for line in lines)


def test_a_spike_is_in_the_picture() -> None:
    made = comparison(["a=1", "a=2"], steps=20_000)
    made.summaries[1].runs[0].measured.curve.loss[12_345] = 40.0
    picture = page(made).partition("Difference from the baseline")[0]
    lines = re.findall(r'<polyline class="s\d behind".*? points="(.*?)"', picture)
    heights = [float(point.split(",")[1]) for line in lines for point in line.split()]
    assert min(heights) == 12.0, "the top of the plot, where the largest loss is"
    assert sum(height < 150 for height in heights) == 1, "and nothing else is near"


def test_curves_run_from_edge_to_edge() -> None:
    loss = next(line for line in Checker(page(comparison(["a=1", "a=2"]))).tags("polyline"))
    across = [float(point.split(",")[0]) for point in (loss["points"] or "").split()]
    assert (across[0], across[-1]) == (62.0, 628.0)
    assert across == sorted(across)


@pytest.mark.parametrize("reached", [0, 1, 7])
def test_all_that_failed(reached: int) -> None:
    """No figure at all is a page too."""
    made = comparison(["a=1", "a=2"], failing=("a=1", "a=2"), reached=reached)
    text = " ".join(Checker(page(made)).text)
    assert text.count("out of memory") >= 2
    assert "NaN" not in text
    assert "nan" not in text


def test_the_terminal_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    made = comparison(["a=1", "a=2", "[b]=3"], seeds=2, failing=("[b]=3",))
    comparison_table(made)
    said = capsys.readouterr().out
    assert "[b]=3: FAILED" in said, "no markup"
    assert "│ [b]=3" in said
    assert "5,000" not in said
    assert "4,950 ± 50" in said, "the mean of 5,000 and 4,900 and half of what lies between"
    assert "left out: lr=7" in said


def test_ticks_are_round_and_inside() -> None:
    for low, high in ((0.0, 1.0), (1.37, 5.62), (-0.003, 0.0041), (1.0, 20_000.0), (1e9, 3e9), (5.0, 5.0000001)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 8, (low, high, found)
        assert all(low <= value <= high for value in found)
