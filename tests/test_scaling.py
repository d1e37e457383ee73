"""float16's loss scale in the training step: unscaled once, skipped steps, growth, and its state."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plain import distance, gradients_taken, job, same, session, state, window
from thrice.errors import Diverged
from thrice.optim.scaler import LossScaler
from thrice.spec.job import Optimizer, Schedule
from thrice.step import train_step
from thrice.techniques.precision import Precision

CLIP = 0.05


def fp16(clip=CLIP, **fields):
    return job(
        optimizer=Optimizer(clip=clip),
        schedule=Schedule(warmup_steps=8),
        techniques=(Precision(mode="fp16", **{"initial_scale": 1024.0, **fields}),),
    )


def overflow(ours):
    """A switch: while it is on, one gradient overflows in each backward."""
    switch = {"on": False}
    ours.model.norm.weight.register_hook(lambda gradient: gradient * math.inf if switch["on"] else gradient)
    return switch


def by_hand(model, pieces, scale, *, clip=math.inf, unscale=1, clip_first=False):
    """Torch's autocast and a constant scale: (gradients that an optimizer would be given, norm before clipping)."""
    model = copy.deepcopy(model)
    count = sum(piece.count for piece in pieces)
    for piece in pieces:
        with torch.autocast("cpu", torch.float16):
            logits = model(piece.inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), piece.targets.flatten(), reduction="sum")
        (loss * (scale / count)).backward()
    if clip_first:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    for parameter in model.parameters():
        parameter.grad /= scale**unscale
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip_first else clip)
    return {name: parameter.grad for name, parameter in model.named_parameters()}, norm.item()


@pytest.mark.parametrize("clip", [None, CLIP])
def test_gradients_are_unscaled_once_and_then_clipped(clip):
    ours = session(fp16(clip))
    before, pieces = copy.deepcopy(ours.model), window(2, 16, 7)
    taken = gradients_taken(ours)
    result = train_step(ours, pieces)
    limit = math.inf if clip is None else clip
    gradients, norm = by_hand(before, pieces, 1024.0, clip=limit)
    # the same operations but for one float32 product: a relative 2⁻²³, and where it falls on the border of a
    # float16, one of its 2⁻¹¹ in a few elements
    assert result.grad_norm == pytest.approx(norm, rel=1e-3)
    assert distance(taken, gradients) < 1e-3
    assert norm > 2 * CLIP
    twice, _ = by_hand(before, pieces, 1024.0, clip=limit, unscale=2)
    assert distance(twice, gradients) > 0.5
    early, _ = by_hand(before, pieces, 1024.0, clip=CLIP, clip_first=True)
    assert distance(early, gradients) > 0.5


def test_an_overflow_moves_nothing_but_the_scale():
    ours = session(fp16())
    switch = overflow(ours)
    first = train_step(ours, window(9, 9))
    before, switch["on"] = state(ours), True
    result = train_step(ours, window(5, 5, seed=1))
    assert not result.taken
    assert result.tokens == 10
    assert math.isfinite(result.loss)
    assert same(state(ours), before)
    assert all(parameter.grad is None for parameter in ours.model.parameters())
    assert ours.scaler.state_dict() == {"scale": 512.0, "good_steps": 0, "skipped_in_row": 1}
    assert (ours.progress.step, ours.progress.skipped_steps, ours.progress.tokens) == (1, 1, first.tokens)
    assert {group["lr"] for group in ours.optimizer.param_groups} == {first.lr}
    switch["on"] = False
    second = train_step(ours, window(7, 7, seed=2))
    assert second.lr == result.lr == 2 * first.lr  # the second warm-up step, which the skipped one did not use up


def test_after_an_overflow_all_goes_on_as_if_it_had_not_been():
    """Bitwise, where the other run has the same scale."""
    ours, other = session(fp16()), session(fp16())
    switch = overflow(ours)
    train_step(ours, window(9, 9))
    train_step(other, window(9, 9))
    switch["on"] = True
    train_step(ours, window(5, 5, seed=1))
    switch["on"] = False
    other.scaler.scale = ours.scaler.scale
    for seed in (2, 3):
        assert train_step(ours, window(7, 7, seed=seed)) == train_step(other, window(7, 7, seed=seed))
    assert same(state(ours), state(other))


def test_the_scale_grows_after_a_run_of_good_steps():
    ours = session(fp16(growth_interval=3))
    switch = overflow(ours)
    scales = []
    for bad in (0, 0, 0, 0, 0, 1, 0, 0, 0):
        switch["on"] = bool(bad)
        train_step(ours, window(4, 4))
        scales.append(ours.scaler.scale)
    # the skipped step also starts the count again
    assert scales == [1024, 1024, 2048, 2048, 2048, 1024, 1024, 1024, 2048]


def test_skips_in_a_row_end_in_an_explanation():
    ours = session(fp16(max_skipped_steps=3))
    switch = overflow(ours)
    for _ in range(2):  # a good step in between starts the count again
        switch["on"] = True
        train_step(ours, window(4))
        train_step(ours, window(4))
        switch["on"] = False
        assert train_step(ours, window(4)).taken
    before, switch["on"] = state(ours), True
    train_step(ours, window(4))
    train_step(ours, window(4))
    with pytest.raises(Diverged, match="3 steps in a row") as error:
        train_step(ours, window(4))
    assert "at step 3" in str(error.value)
    assert "lower lr" in str(error.value)
    assert same(state(ours), before)


def test_a_scale_too_large_finds_its_way_down():
    """A true overflow, of float16 itself: nothing planted."""
    ours = session(fp16(initial_scale=2.0**40))
    before = state(ours)
    results = [train_step(ours, window(9, 9))]
    while not results[-1].taken:
        assert same(state(ours), before)
        results.append(train_step(ours, window(9, 9)))
    assert 10 < len(results) < 25
    assert ours.scaler.scale == 2.0 ** (41 - len(results))
    assert ours.progress.step == 1


def test_a_loss_that_is_not_finite_is_not_blamed_on_the_scale():
    ours = session(fp16())
    loss = ours.loss
    ours.loss = lambda output, targets: loss(output, targets) + math.inf
    before, scaler = state(ours), ours.scaler.state_dict()
    with pytest.raises(Diverged, match="the loss of step 1"):
        train_step(ours, window(3, 4))
    assert same(state(ours), before)
    assert ours.scaler.state_dict() == scaler


def test_the_scaler_goes_through_its_state_whole():
    def scaler(scale):
        return LossScaler(scale=scale, growth_factor=2.0, backoff_factor=0.5, growth_interval=5, max_skipped_steps=4)

    saved = scaler(512.0)
    for event in (saved.stepped, saved.skipped, saved.stepped, saved.stepped, saved.stepped):
        event()
    assert saved.state_dict() == {"scale": 256.0, "good_steps": 3, "skipped_in_row": 0}
    loaded = scaler(65536.0)
    loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert loaded == saved
    scales = []
    for _ in range(3):
        loaded.stepped()
        scales.append(loaded.scale)
    assert scales == [256.0, 512.0, 512.0]  # at the fifth good step since the change, not since the load
    loaded.skipped()
    again = scaler(1.0)
    again.load_state_dict(loaded.state_dict())
    assert again.skipped_in_row == 1


def test_unscaling_nothing_is_nothing():
    LossScaler(scale=2.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1, max_skipped_steps=1).unscale_([])
