"""Loss curves from a run's metrics, and the verdict on the gap between two, on curves that are made up."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from thrice.curves import Curve, Measured, gap, measure, smooth, spread, thin
from thrice.verdict import judge

STEPS = 200


def curve(loss: np.ndarray, tokens_per_step: int = 100) -> Curve:
    steps = np.arange(1.0, len(loss) + 1)
    return Curve(steps=steps, tokens=steps * tokens_per_step, loss=loss)


def falling(steps: int = STEPS, *, noise: float = 0.0, seed: int = 0, offset: float = 0.0) -> np.ndarray:
    """From 5.5 down to 1.5, with noise as another order of the data makes it."""
    rough = np.random.default_rng(seed).normal(size=steps) * noise
    return 1.5 + 4 * np.exp(-np.arange(steps) / steps * 5) + rough + offset


def measured(loss: np.ndarray, validation: float | None = 2.0, tokens_per_step: int = 100) -> Measured:
    return Measured(
        curve=curve(loss, tokens_per_step),
        final_loss=float(loss[-10:].mean()),
        validation_loss=validation,
        tokens_per_s=1000.0,
        peak_bytes=10**8,
        skipped_steps=0,
    )


def test_a_run_is_measured_from_its_rows(tmp_path: Path) -> None:
    def row(step: int, loss: float | None, rate: float, *, taken: bool = True) -> dict[str, object]:
        return {"step": step, "taken": taken, "loss": loss, "tokens": 7 if taken else 0, "tokens_per_s": rate}

    rows = [row(1, 5.0, 1.0), row(2, None, 900.0, taken=False), row(2, 4.0, 10.0), row(3, 3.0, 30.0), row(4, 2.5, 20.0)]
    rows.insert(3, {"step": 2, "validation_loss": 9.0, "validation_tokens": 5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows) + '{"torn')
    unfinished = measure(tmp_path)
    assert unfinished.curve.steps.tolist() == [1, 2, 3, 4]
    assert unfinished.curve.tokens.tolist() == [7, 14, 21, 28]
    assert unfinished.final_loss == 2.5, "5% of four steps is one of them"
    assert unfinished.tokens_per_s == 20.0, "the median of 10, 30 and 20: neither the first nor a skipped one"
    assert unfinished.skipped_steps == 1
    assert unfinished.validation_loss is None, "of the end of the run, which has not come"
    (tmp_path / "record.json").write_text(json.dumps({"measured": {"validation_loss": 2.25, "peak_bytes": 9}}))
    assert (measure(tmp_path).validation_loss, measure(tmp_path).peak_bytes) == (2.25, 9)
    nothing = measure(tmp_path / "not there")
    assert (nothing.final_loss, nothing.tokens_per_s, len(nothing.curve.loss)) == (None, None, 0)


def test_smoothing_is_the_mean_of_what_is_around() -> None:
    values = np.random.default_rng(0).normal(size=100)
    smoothed = smooth(values)
    for place in (0, 1, 50, 99):
        around = values[max(0, place - 2) : place + 3]  # 5% of 100 is a window of 5
        assert smoothed[place] == pytest.approx(around.mean(), rel=1e-12)  # a difference of running sums, in float64
    assert smooth(np.array([3.0, 1.0])).tolist() == [3.0, 1.0]
    assert smooth(np.empty(0)).tolist() == []


def test_thinning_keeps_every_spike() -> None:
    x = np.arange(20_000.0)
    y = falling(20_000, noise=0.1)
    y[7_777], y[12_345] = 50.0, -50.0
    thin_x, thin_y = thin(x, y, 300)
    assert len(thin_x) <= 300
    assert (thin_x[0], thin_x[-1]) == (0, 19_999)
    assert {7_777.0, 12_345.0} <= set(thin_x)
    assert np.array_equal(thin_y, y[thin_x.astype(int)])
    assert np.all(np.diff(thin_x) > 0)


def test_a_gap_over_tokens_is_not_one_over_steps() -> None:
    """Twice the batch in half the steps, the same loss at the same number of tokens."""
    small, large = curve(falling(400), 100), curve(falling(400)[1::2], 200)
    over_tokens, over_steps = gap(small, large, "tokens"), gap(small, large, "steps")
    assert over_tokens is not None
    assert over_steps is not None
    assert over_tokens.mean < 0.01, "what smoothing the two grids leaves"
    assert over_steps.mean > 0.3
    assert gap(small, curve(np.empty(0)), "steps") is None


def test_a_gap_is_in_nats() -> None:
    found = gap(curve(falling(offset=0.25)), curve(falling()), "steps")
    assert found is not None
    assert found.mean == pytest.approx(0.25, rel=1e-9)  # sums in float64
    assert found.largest == pytest.approx(0.25, rel=1e-9)


def test_spread() -> None:
    found = spread([1.0, None, 4.0, 2.0])
    assert found is not None
    assert (found.mean, found.half_range) == (pytest.approx(7 / 3), 1.5)
    assert spread([None]) is None


# the verdict

BASELINE = {seed: measured(falling(noise=0.1, seed=seed), 2.0 + 0.01 * seed) for seed in range(3)}


def shifted(offset: float, validation: float = 0.0) -> dict[int, Measured]:
    """The baseline's runs with the same noise, as the same data makes it, and an offset."""
    return {
        seed: measured(run.curve.loss + offset, (run.validation_loss or 0.0) + validation)
        for seed, run in BASELINE.items()
    }


def test_within_what_seeds_change() -> None:
    verdict = judge(shifted(0.005, 0.001), BASELINE, "steps")
    assert verdict.judgement == "within"
    assert verdict.sentence.startswith("within what another seed changes: mean gap 0.0050 (seeds 0.0")
    assert verdict.gap is not None
    assert verdict.seeds_gap is not None
    assert verdict.gap.mean < verdict.seeds_gap.mean
    assert verdict.seeds_validation_gap == pytest.approx(0.02)
    assert verdict.validation_gap == pytest.approx(0.001)
    assert "validation +0.0000 " in judge(shifted(0.001, -1e-6), BASELINE, "steps").sentence, "no minus before nothing"


@pytest.mark.parametrize(
    ("variant", "what"),
    [
        (shifted(0.5), "the mean gap and the largest gap"),
        (shifted(-0.5), "the mean gap and the largest gap"),
        (shifted(0.0, 0.1), "the validation loss"),
    ],
)
def test_more_than_seeds_do(variant: dict[int, Measured], what: str) -> None:
    verdict = judge(variant, BASELINE, "steps")
    assert verdict.judgement == "differs"
    assert verdict.sentence.startswith(f"differs by more than seeds do, in {what}: ")


def test_a_passing_bump_differs_in_the_largest_gap() -> None:
    bumped = {}
    for seed, run in BASELINE.items():
        loss = run.curve.loss.copy()
        loss[100:106] += 2.0
        bumped[seed] = measured(loss, run.validation_loss)
    verdict = judge(bumped, BASELINE, "steps")
    assert verdict.judgement == "differs"
    assert "in the largest gap: " in verdict.sentence or "and the largest gap: " in verdict.sentence


def test_one_seed_is_no_yardstick() -> None:
    verdict = judge({0: shifted(0.5)[0]}, {0: BASELINE[0]}, "steps")
    assert verdict.judgement == "no yardstick"
    assert verdict.sentence.startswith(
        "mean gap 0.5000, largest 0.5000, validation +0.0000; one seed gives no yardstick"
    )
    assert verdict.seeds_gap is None
    assert verdict.seeds_validation_gap is None


def test_the_same_is_the_same_to_the_last_digit() -> None:
    assert judge(shifted(0.0), BASELINE, "steps").judgement == "same"
    assert judge({0: BASELINE[0]}, {0: BASELINE[0]}, "steps").judgement == "same"
    assert judge(shifted(1e-15), BASELINE, "steps").judgement == "within"


def test_a_run_that_failed_is_compared_as_far_as_it_went() -> None:
    stopped = {0: measured(falling(noise=0.1)[:20], None), 1: measured(falling(noise=0.1, seed=1))}
    verdict = judge(stopped, BASELINE, "steps", ["the loss of step 21 is not finite (exit code 1)"])
    assert verdict.judgement == "failed"
    assert verdict.sentence.startswith("1 of 2 runs failed: the loss of step 21 is not finite (exit code 1) · as far")
    assert verdict.gap is not None
    assert math.isfinite(verdict.gap.largest)


def test_nothing_to_compare_with() -> None:
    assert judge(shifted(0.0), {}, "steps").sentence.startswith("no run of the baseline finished")
    apart = {0: measured(falling(5))}
    nine = Curve(steps=np.array([9.0]), tokens=np.array([9.0]), loss=np.ones(1))
    later = {0: replace(apart[0], curve=nine)}
    assert judge(later, apart, "steps").sentence == "the curves have no step in common"
