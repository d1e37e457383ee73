"""What each precision stores and computes in, and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plain import gradients_taken, job, same, session, state, window
from thrice.compose import compose
from thrice.data.batches import Batch
from thrice.errors import ConfigError
from thrice.runtime.technique import Claim
from thrice.spec.job import Optimizer
from thrice.step import evaluate, train_step
from thrice.techniques.precision import Precision

MODES = ("fp32", "bf16", "fp16", "bf16-pure")
COMPUTED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16}


def composed(mode, **changes):
    fields = {"initial_scale": 1024.0} if mode == "fp16" else {}
    return session(job(techniques=(Precision(mode=mode, **fields),), optimizer=Optimizer(), **changes))


@pytest.mark.parametrize("mode", MODES)
def test_dtypes_of_what_is_stored_and_computed(mode):
    ours = composed(mode)
    seen = {}
    ours.model.blocks[0].mlp.up.register_forward_hook(lambda m, args, out: seen.update(product=out.dtype))
    ours.model.blocks[0].attention_norm.register_forward_pre_hook(lambda m, args: seen.update(residual=args[0].dtype))
    loss = ours.loss

    def watched(output, targets):
        value = loss(output, targets)
        seen.update(logits=output.dtype, loss=value.dtype)
        return value

    ours.loss = watched
    taken = gradients_taken(ours)
    assert train_step(ours, window(9, 16)).taken
    stored = torch.bfloat16 if mode == "bf16-pure" else torch.float32
    assert {parameter.dtype for parameter in ours.model.parameters()} == {stored}
    assert {gradient.dtype for gradient in taken.values()} == {torch.float32}
    states = {value.dtype for states in ours.optimizer.state.values() for value in states.values()}
    assert states == {torch.float32}
    assert seen == {"product": COMPUTED[mode], "logits": COMPUTED[mode], "residual": stored, "loss": torch.float32}
    assert ours.model.cos.dtype is torch.float32
    assert (ours.scaler is not None) == (mode == "fp16")


@pytest.mark.parametrize("mode", MODES)
def test_the_norm_is_taken_in_float32(mode):
    """Rounded once, at the end; and squares of 300 summed in float16 would be infinite."""
    ours = composed(mode)
    x = (300 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))).to(COMPUTED[mode])
    with ours.compute():
        out = ours.model.norm(x).detach().to(COMPUTED[mode])
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if mode == "fp32":
        assert torch.allclose(out.double(), exact, rtol=1e-6, atol=0)
    else:
        assert torch.equal(out, exact.to(COMPUTED[mode]))


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_autocast_is_entered_for_each_micro_batch(mode):
    """Its cache of cast weights must not outlive an update: the next window sees the new weight."""
    ours = composed(mode)
    train_step(ours, window(9))
    with torch.no_grad():
        ours.model.blocks[0].mlp.down.weight.add_(1.0)
    outputs = []
    ours.model.blocks[0].mlp.down.register_forward_hook(lambda m, args, out: outputs.append((args[0], out)))
    train_step(ours, window(9, 9))
    weight_before = ours.model.blocks[0].mlp.down.weight.detach().clone()
    train_step(ours, window(9))
    (x, first), _, (x_after, last) = outputs
    dtype = COMPUTED[mode]
    # the product by hand, with the weight as it was in that window
    assert torch.equal(last, F.linear(x_after.to(dtype), weight_before.to(dtype)))
    assert not torch.equal(first, F.linear(x.to(dtype), weight_before.to(dtype)))


def test_autocast_around_windows_would_be_seen():
    """The test above can fail: under one autocast for two windows, the second computes with the first's weight."""
    ours = composed("bf16")
    outputs = []
    ours.model.blocks[0].mlp.down.register_forward_hook(lambda m, args, out: outputs.append((args[0], out)))
    with torch.autocast("cpu", torch.bfloat16):
        train_step(ours, window(9))
        weight = ours.model.blocks[0].mlp.down.weight.detach().clone()
        train_step(ours, window(9))
    x, out = outputs[-1]
    assert not torch.equal(out, F.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16)))


def test_an_update_below_bfloat16_is_kept_in_the_masters():
    """float32 parameters under bf16: 1.0 moves by 1e-4, which bfloat16 cannot show."""
    ours = composed("bf16", lr=1e-4)
    train_step(ours, window(9))
    moved = ours.model.norm.weight.detach() - 1.0
    assert bool((moved.abs() > 5e-5).all())
    assert bool((ours.model.norm.weight.to(torch.bfloat16) == 1.0).all())


@pytest.mark.parametrize("mode", ["bf16", "bf16-pure"])
def test_bf16_is_the_same_training_to_its_own_precision(mode):
    exact, low = session(job()), session(job(techniques=(Precision(mode=mode),)))
    right, ours = gradients_taken(exact), gradients_taken(low)
    a, b = train_step(exact, window(9, 16)), train_step(low, window(9, 16))
    # bfloat16 keeps 8 bits: a relative 2⁻⁹ for each rounding; sums of many of them stay within ten (seen: 6)
    assert b.loss == pytest.approx(a.loss, rel=10 * 2.0**-9)
    for name, gradient in right.items():
        assert float((ours[name] - gradient).norm() / gradient.norm()) < 10 * 2.0**-9, name


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_computes_in_the_same_precision(mode):
    ours = composed(mode)
    dtypes = set()
    ours.model.head.register_forward_hook(lambda m, args, out: dtypes.add(out.dtype))
    evaluate(ours, window(9))
    assert dtypes == {COMPUTED[mode]}


def test_fp32_is_torch_as_it_is():
    plain, named = session(job()), session(job(techniques=(Precision(mode="fp32"),)))
    assert train_step(plain, window(5, 9)) == train_step(named, window(5, 9))
    assert same(state(plain), state(named))


def test_a_tied_weight_stays_tied_in_bfloat16():
    model = composed("bf16-pure").model
    assert model.head.weight is model.embedding.weight


def test_a_frozen_parameter_is_stored_low_too():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    ours = session(job(techniques=(Precision(mode="bf16-pure"),)), model=model, loss=lambda out, _: out.float().sum())
    before = model[0].weight.clone()
    inputs = torch.ones(1, 3, dtype=torch.bfloat16)
    train_step(ours, [Batch.of(inputs=inputs, targets=torch.zeros(1, 1), sample_ids=(0,))])
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.dtype is torch.bfloat16


@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("field", ["initial_scale", "growth_interval", "max_skipped_steps"])
def test_a_scaler_without_fp16_is_a_problem_that_explains_itself(mode, field):
    (problem,) = Precision(mode=mode, **{field: 64}).check()
    assert problem.key == field
    assert problem.value == 64
    assert "loss scaling belongs to fp16" in problem.why
    assert mode in problem.why
    assert "fp16" in problem.fix


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_rounding_without_bf16_pure_is_a_problem_that_explains_itself(mode):
    (problem,) = Precision(mode=mode, rounding="stochastic").check()
    assert (problem.key, problem.value) == ("rounding", "stochastic")
    assert mode in problem.why
    assert "bf16-pure" in problem.fix


@pytest.mark.parametrize("field", ["initial_scale", "growth_interval", "max_skipped_steps"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_impossible_values_are_problems(field, value):
    (problem,) = Precision(mode="fp16", **{field: value}).check()
    assert problem.key == field


def test_every_example_is_without_a_problem():
    examples = list(Precision.examples())
    assert not [problem for example in examples for problem in example.check()]
    assert {example.mode for example in examples} == set(MODES)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_bf16_pure_refuses_kernels_that_do_not_round(implementation):
    asked = job(techniques=(Precision(mode="bf16-pure"),), optimizer=Optimizer(implementation=implementation))
    with pytest.raises(ConfigError) as error:
        compose(asked, vocabulary=61)
    assert f"optimizer.implementation = '{implementation}'" in str(error.value)
    assert "bfloat16" in str(error.value)
    assert 'implementation = "auto"' in str(error.value)
    for allowed in ("auto", "loop"):
        fine = job(techniques=(Precision(mode="bf16-pure"),), optimizer=Optimizer(implementation=allowed))
        assert not list(Precision(mode="bf16-pure").refuse(fine))


def test_claims():
    assert Precision(mode="fp32").claim() is Claim.BITWISE
    assert {Precision(mode=mode).claim() for mode in MODES[1:]} == {Claim.LOWER_PRECISION}
    for mode in MODES:
        arithmetic = Precision(mode=mode).arithmetic()
        assert (arithmetic is None) == (mode == "fp32")


def test_what_was_done_is_said():
    said = {mode: composed(mode).applied["precision"].partition("; ") for mode in MODES}
    assert {mode: bool(speed) for mode, (_, _, speed) in said.items()} == {mode: mode != "fp32" for mode in MODES}
    for _, _, speed in said.values():
        assert not speed or re.fullmatch(r"matrix products run \S+ times as fast as in float32 here", speed)
    assert {mode: done for mode, (done, _, _) in said.items()} == {
        "fp32": "float32 throughout",
        "bf16": "bfloat16 compute, float32 parameters",
        "fp16": "float16 compute, float32 parameters, loss scale from 1024",
        "bf16-pure": "bfloat16 parameters, float32 gradients and states, stochastic updates",
    }
