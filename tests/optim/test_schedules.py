"""Learning rates against their closed forms, at every step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from thrice.optim.schedules import learning_rate
from thrice.spec.job import BatchRamp, Job, Schedule

PEAK, TOTAL = 3e-3, 40


def job(schedule: Schedule, steps: int = TOTAL, **changes) -> Job:
    return replace(Job(lr=PEAK, max_steps=steps, micro_batch=2, global_batch=8, schedule=schedule), **changes)


def rates(job_: Job, steps: int) -> list[float]:
    """What a run that skips nothing sees."""
    rate, ledger, samples, seen = learning_rate(job_), job_.ledger(), 0, []
    for step in range(steps):
        seen.append(rate(step, samples))
        samples += ledger.global_batch_at(samples)
    return seen


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("decay", ["cosine", "linear", "constant", "wsd"])
def test_closed_form(decay, floor, warmup):
    schedule = Schedule(
        decay=decay, warmup_steps=warmup, min_lr_ratio=floor, decay_steps=10 if decay == "wsd" else None
    )
    got = rates(job(schedule), TOTAL + 5)
    assert got[:warmup] == pytest.approx([PEAK * n / warmup for n in range(1, warmup + 1)], rel=1e-12)
    least, span = floor * PEAK, TOTAL - warmup
    for step in range(warmup, TOTAL + 5):
        x = min(step, TOTAL) - warmup
        expected = {
            "cosine": least + (PEAK - least) * math.cos(math.pi * x / (2 * span)) ** 2,
            "linear": PEAK + (least - PEAK) * x / span,
            "constant": PEAK,
            "wsd": PEAK + (least - PEAK) * max(0, min(step, TOTAL) - 30) / 10,
        }[decay]
        assert got[step] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert got[warmup] == PEAK
    assert min(got[:TOTAL]) > 0


def test_the_first_step_is_not_lost_to_a_rate_of_0():
    assert rates(job(Schedule(warmup_steps=100), steps=1000), 1) == [PEAK / 100]


def test_a_warm_up_longer_than_the_run_ends_in_it():
    assert rates(job(Schedule(warmup_steps=10), steps=4), 4) == pytest.approx([PEAK * n / 10 for n in (1, 2, 3, 4)])


def test_warm_up_in_samples_is_as_long_whatever_the_batch():
    for batch in (2, 8, 16):
        got = rates(job(Schedule(decay="constant", warmup_samples=32), global_batch=batch, micro_batch=2), 40)
        warmup = 32 // batch
        assert got[: warmup + 1] == pytest.approx([PEAK * min(1, n / warmup) for n in range(1, warmup + 2)])


def test_wsd_decays_over_a_tenth_where_not_said():
    got = rates(job(Schedule(decay="wsd", min_lr_ratio=0.0)), TOTAL)
    assert got[:37] == [PEAK] * 37
    assert got[37:] == pytest.approx([PEAK * left for left in (0.75, 0.5, 0.25)])


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_lr_follows_the_batch_once_however_it_is_cut(scaling, factor):
    for micro_batch in (1, 2, 8):
        scaled = job(Schedule(decay="constant"), lr_scaling=scaling, base_global_batch=2, micro_batch=micro_batch)
        assert rates(scaled, 5) == pytest.approx([PEAK * factor] * 5)
        assert scaled.ledger().lr == pytest.approx(PEAK * factor)


def test_with_a_ramp_the_schedule_counts_samples_and_the_peak_follows_the_batch():
    ramped = job(
        Schedule(decay="linear", warmup_samples=8, min_lr_ratio=0.0),
        batch_ramp=BatchRamp(start=2, samples=24),
        lr_scaling="linear",
        base_global_batch=8,
        steps=20,
    )
    ledger = ramped.ledger()
    batches, samples = [], 0
    got = rates(ramped, 20)
    total = ledger.samples_after(20)
    for rate in got:
        batch = ledger.global_batch_at(samples)
        batches.append(batch)
        share = min(1, (samples + batch) / 8) if samples < 8 else 1 - (samples - 8) / (total - 8)
        assert rate == pytest.approx(PEAK * batch / 8 * share)
        samples += batch
    assert batches[:9] == [2, 2, 2, 2, 4, 4, 6, 6, 8], "8 samples at each size"
    assert sum(batches) == total == samples
    assert ledger.steps_for(total) == 20
    assert ledger.steps_for(total + 1) == 21


def test_lr_is_a_function_of_steps_taken():
    rate = learning_rate(job(Schedule(warmup_steps=4)))
    assert rate(2, 16) == rate(2, 999), "without a ramp samples do not count"
