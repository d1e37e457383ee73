"""Learning rates against their closed forms, at every step."""

from __future__ import annotations

import math

import pytest

from thrice.optim.schedules import lr_at
from thrice.spec.job import Schedule

PEAK, TOTAL = 3e-3, 40


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_closed_form(decay, floor, warmup):
    schedule = Schedule(decay=decay, warmup_steps=warmup, min_lr_ratio=floor)
    rates = [lr_at(step, peak=PEAK, schedule=schedule, total_steps=TOTAL) for step in range(TOTAL + 5)]
    assert rates[:warmup] == pytest.approx([PEAK * n / warmup for n in range(1, warmup + 1)], rel=1e-12)
    least, span = floor * PEAK, TOTAL - warmup
    for step in range(warmup, TOTAL + 5):
        x = min(step, TOTAL) - warmup
        expected = {
            "cosine": least + (PEAK - least) * math.cos(math.pi * x / (2 * span)) ** 2,
            "linear": PEAK + (least - PEAK) * x / span,
            "constant": PEAK,
        }[decay]
        assert rates[step] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert rates[warmup] == PEAK
    assert min(rates[:TOTAL]) > 0


def test_the_first_step_is_not_lost_to_a_rate_of_0():
    schedule = Schedule(warmup_steps=100)
    assert lr_at(0, peak=PEAK, schedule=schedule, total_steps=1000) == PEAK / 100


def test_a_warm_up_longer_than_the_run_ends_in_it():
    schedule = Schedule(warmup_steps=10)
    rates = [lr_at(step, peak=PEAK, schedule=schedule, total_steps=4) for step in range(4)]
    assert rates == pytest.approx([PEAK * n / 10 for n in (1, 2, 3, 4)])
