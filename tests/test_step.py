"""The training step against plain torch: normalisation, clipping, what is not finite, and evaluation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from plain import Plain, distance, gradients_taken, job, same, session, state, window
from thrice.data.batches import Batch
from thrice.errors import DataError, Diverged
from thrice.spec.job import Optimizer, Schedule
from thrice.step import evaluate, train_step
from thrice.techniques.precision import Precision

# float32 sums in another order: a relative 2⁻²⁴ each, some hundred of them; seen 4e-7
ROUNDING = 5e-6

CUTS = {
    "two micro-batches of 2 and 6 targets": (2, 6),
    "a micro-batch with no target": (5, 0, 3),
    "fewer micro-batches than grad_accum_steps": (7, 4),
    "more targets in some": (16, 1, 9, 2),
}


@pytest.mark.parametrize("valid", CUTS.values(), ids=CUTS)
def test_a_cut_window_equals_the_whole(valid):
    ours = session(job(global_batch=4, micro_batch=1))
    plain = Plain(ours.model)
    taken = gradients_taken(ours)
    for step in range(3):
        pieces = window(*valid, seed=step)
        result = train_step(ours, pieces)
        loss, norm, gradients = plain.step(pieces)
        assert result.taken
        assert result.tokens == sum(valid)
        assert result.loss == pytest.approx(loss, rel=ROUNDING)
        assert result.grad_norm == pytest.approx(norm, rel=ROUNDING)
        assert distance(taken, gradients) < ROUNDING
        assert distance(dict(ours.model.named_parameters()), dict(plain.model.named_parameters())) < ROUNDING


def test_the_cut_does_not_matter():
    whole = window(13, 4, 16, 1, 0, 8, 2, 11)
    joined = {
        size: [
            Batch.of(
                inputs=torch.cat([b.inputs for b in whole[i : i + size]]),
                targets=torch.cat([b.targets for b in whole[i : i + size]]),
                sample_ids=tuple(range(i, i + size)),
            )
            for i in range(0, 8, size)
        ]
        for size in (1, 2, 3, 8)
    }
    results = {}
    for size, pieces in joined.items():
        ours = session(job())
        results[size] = gradients_taken(ours)
        train_step(ours, pieces)
    assert max(distance(results[size], results[8]) for size in (1, 2, 3)) < ROUNDING


def test_the_wrong_normalisations_are_far_off():
    """What the tests above exclude, written out: each is measurably another gradient."""
    plain = Plain(session(job()).model)
    pieces = window(2, 6)
    plain.backward(pieces)
    right = plain.gradients()
    plain.model.zero_grad()
    for piece in pieces:  # a mean of means
        plain.backward([piece])
    mean_of_means = {name: gradient / len(pieces) for name, gradient in plain.gradients().items()}
    assert distance(mean_of_means, right) > 0.1
    # by the nominal four micro-batches where two are left, and by the micro-batches on top of the tokens
    assert distance({name: gradient * 2 / 4 for name, gradient in right.items()}, right) == pytest.approx(0.5)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "bf16-pure"])
def test_a_window_with_no_target_changes_nothing_and_says_so(mode):
    ours = session(job(optimizer=Optimizer(), techniques=(Precision(mode=mode),)))
    train_step(ours, window(3, 4))
    before, scale = state(ours), ours.scaler and ours.scaler.state_dict()
    result = train_step(ours, window(0, 0))
    assert (result.taken, result.loss, result.grad_norm, result.tokens) == (False, None, None, 0)
    assert same(state(ours), before)
    assert all(parameter.grad is None for parameter in ours.model.parameters())
    assert (ours.progress.step, ours.progress.skipped_steps, ours.progress.tokens) == (1, 1, 7)
    assert (ours.scaler and ours.scaler.state_dict()) == scale


def test_a_step_not_taken_does_not_advance_the_schedule():
    scheduled = job(schedule=Schedule(decay="linear", warmup_steps=3, min_lr_ratio=0.0), max_steps=7)
    ours = session(scheduled)
    full, empty = window(9, 9), window(0, 0)
    rates = [train_step(ours, pieces).lr for pieces in (full, empty, full, empty, full, full, full)]
    expected = [0.1 / 3, 0.2 / 3, 0.2 / 3, 0.1, 0.1, 0.1, 0.075]
    assert rates == pytest.approx(expected, rel=1e-12)
    assert all(group["lr"] == rates[-1] for group in ours.optimizer.param_groups)


def test_the_window_is_clipped_once_with_the_norm_that_is_reported():
    clip = 0.05
    ours = session(job(optimizer=replace(job().optimizer, clip=clip)))
    plain = Plain(ours.model)
    taken = gradients_taken(ours)
    pieces = window(2, 16, 7, 5)
    result = train_step(ours, pieces)
    _, norm, gradients = plain.step(pieces, clip)
    assert norm > 2 * clip
    assert result.grad_norm == pytest.approx(norm, rel=ROUNDING)
    assert distance(taken, gradients) < ROUNDING
    assert distance(dict(ours.model.named_parameters()), dict(plain.model.named_parameters())) < ROUNDING
    total = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in taken.values()))
    assert total == pytest.approx(clip, rel=1e-4)  # torch's clipping adds 1e-6 to the norm, against division by 0

    # each micro-batch clipped by itself, then again: another direction, which no rescaling explains
    wrong = Plain(session(job()).model)
    count = sum(piece.count for piece in pieces)
    summed = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    for piece in pieces:
        wrong.model.zero_grad()
        wrong.backward([piece])
        for parameter in wrong.model.parameters():
            parameter.grad *= piece.count / count
        nn.utils.clip_grad_norm_(wrong.model.parameters(), clip)
        for name, gradient in wrong.gradients().items():
            summed[name] += gradient
    scale = clip / math.sqrt(sum(float(gradient.square().sum()) for gradient in summed.values()))
    assert distance({name: gradient * scale for name, gradient in summed.items()}, gradients) > 0.05


def test_a_gradient_below_the_clip_is_left_as_it_is():
    ours = session(job(optimizer=replace(job().optimizer, clip=1e3)))
    plain = Plain(ours.model)
    taken = gradients_taken(ours)
    train_step(ours, window(5, 9))
    assert distance(taken, plain.step(window(5, 9))[2]) < ROUNDING


class Line(nn.Module):
    """Float inputs (B, T) to one number each."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.5]]))

    def forward(self, x):
        return x * self.weight


def squares(output, targets):
    return (output - 1).square()[targets != -100].sum()


def floats(*rows, first_id=0, targets=0):
    inputs = torch.tensor(rows)
    ids = tuple(range(first_id, first_id + len(rows)))
    return Batch.of(inputs=inputs, targets=torch.full(inputs.shape, targets), sample_ids=ids)


def planted(ours, gradient=1.0, loss=1.0, after=0):
    """From its `after`-th call on, the last norm's gradient is multiplied by one number, the loss by the other."""
    calls = {"gradient": 0, "loss": 0}
    plain_loss = ours.loss

    def bad_gradient(value):
        calls["gradient"] += 1
        return value * gradient if calls["gradient"] > after else value

    def bad_loss(output, targets):
        calls["loss"] += 1
        value = plain_loss(output, targets)
        # added as a constant, so that the gradient stays finite
        return value + (loss if calls["loss"] > after and loss != 1.0 else 0.0)

    ours.model.norm.weight.register_hook(bad_gradient)
    ours.loss = bad_loss


@pytest.mark.parametrize(
    "fault", [{"gradient": math.inf}, {"gradient": math.nan}, {"loss": math.inf}, {"loss": math.nan}]
)
@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16-pure"])
def test_what_is_not_finite_stops_the_run_and_touches_nothing(fault, mode):
    ours = session(job(optimizer=Optimizer(), techniques=(Precision(mode=mode),)))
    planted(ours, **fault, after=2)
    train_step(ours, window(3, 4))
    before = state(ours)
    with pytest.raises(Diverged) as error:
        train_step(ours, window(3, 4, seed=1))
    assert same(state(ours), before)
    assert all(parameter.grad is None for parameter in ours.model.parameters())
    assert ours.progress.step == 1
    message = str(error.value)
    assert "step 2" in message
    assert "samples 0, 1" in message
    assert ("the loss" if "loss" in fault else "the gradient") in message
    assert "nothing was updated" in message


def test_only_the_micro_batch_whose_loss_is_not_finite_is_named():
    ours = session(job())
    planted(ours, loss=math.nan, after=1)
    with pytest.raises(Diverged, match=r"samples 1\)"):
        train_step(ours, window(3, 4))


def test_a_long_list_of_samples_is_cut_visibly():
    ours = session(job())
    planted(ours, loss=math.nan)
    with pytest.raises(Diverged, match=r"samples 0, 1, 2, 3, 4, 5, 6, 7 and 4 more\)"):
        train_step(ours, window(9, samples=12))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("targets", [0, -100], ids=["counted", "ignored"])
def test_data_that_is_not_finite_is_named_by_its_samples(value, targets):
    ours = session(job(), model=Line(), loss=squares)
    train_step(ours, [floats([0.5, 1.5])])
    before = state(ours)
    good = floats([1.0, 2.0], [3.0, 4.0], first_id=10)
    bad = floats([1.0, 2.0], [3.0, value], [5.0, 6.0], [7.0, 8.0], first_id=20)
    if targets == -100:  # a target that does not count is no shelter: 0 × NaN is NaN
        bad.targets[1] = -100
        ours.loss = lambda output, targets: ((output - 1).square() * (targets != -100)).sum()
    with pytest.raises(DataError, match="step 2") as error:
        train_step(ours, [good, bad])
    assert "samples 21)" in str(error.value)
    assert same(state(ours), before)
    assert ours.progress.step == 1


def test_evaluation_counts_each_sample_once_and_averages_over_tokens():
    ours = session(job())
    batches = window(2, 16, 0, 5)
    loss, targets = evaluate(ours, batches)
    inputs, labels = (torch.cat([getattr(batch, part) for batch in batches]) for part in ("inputs", "targets"))
    with torch.no_grad():
        logs = ours.model(inputs).log_softmax(-1)
    each = [-float(logs[row, t, labels[row, t]]) for row, t in (labels != -100).nonzero().tolist()]
    assert targets == len(each) == 23
    assert loss == pytest.approx(math.fsum(each) / 23, rel=ROUNDING)
    means = [evaluate(ours, [batch])[0] for batch in batches if batch.count]
    assert abs(sum(means) / 3 - loss) > 1e-3  # the mean of means is another number


def test_evaluation_of_nothing_is_not_a_loss():
    loss, targets = evaluate(session(job()), window(0, 0))
    assert math.isnan(loss)
    assert targets == 0


def test_evaluation_leaves_no_trace():
    ours = session(job(decoder=replace(job().decoder, dropout=0.5)))
    frozen = ours.model.blocks[0].eval()
    modes = [module.training for module in ours.model.modules()]
    before, random = state(ours), torch.get_rng_state()
    first = evaluate(ours, window(9, 9))
    assert evaluate(ours, window(9, 9)) == first  # dropout is off
    assert [module.training for module in ours.model.modules()] == modes
    assert not frozen.training
    assert torch.equal(torch.get_rng_state(), random)
    assert same(state(ours), before)
    assert all(parameter.grad is None for parameter in ours.model.parameters())


def test_evaluation_that_fails_gives_the_mode_back():
    ours = session(job())

    def broken():
        yield window(3)[0]
        raise DataError("unreadable")

    with pytest.raises(DataError, match="unreadable"):
        evaluate(ours, broken())
    assert all(module.training for module in ours.model.modules())
