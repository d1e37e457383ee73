"""What states are stored in, what that saves, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plain import CPU, VOCABULARY, job, same, session, state, window
from thrice.checkpoint import restore, save
from thrice.compose import compose
from thrice.errors import ConfigError, UsageError
from thrice.observe.rehearse import rehearse
from thrice.observe.trace import OPTIMIZER_STATES
from thrice.runtime.technique import Arithmetic, Claim
from thrice.spec.job import Decoder, Optimizer
from thrice.step import train_step
from thrice.techniques.optimizer_states import OptimizerStates
from thrice.techniques.precision import Precision

DECODER = Decoder(layers=2, hidden=64, heads=4, kv_heads=2, mlp_hidden=96)
LOW = pytest.mark.parametrize("format", ["bf16", "8bit"])


def asked(format, *others, **changes):
    fields = {"decoder": DECODER, "optimizer": Optimizer(), "lr": 1e-3, **changes}
    return job(techniques=(OptimizerStates(format=format), *others), **fields)


@LOW
@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lars"])
def test_states_are_stored_as_asked(format, name):
    ours = session(asked(format, optimizer=Optimizer(name=name)))
    assert train_step(ours, window(9)).taken
    large = ours.optimizer.state[ours.model.blocks[0].mlp.up.weight]
    norm = ours.optimizer.state[ours.model.norm.weight]
    kinds = {value.dtype for key, value in large.items() if key != "step"}
    if format == "bf16":
        assert kinds == {value.dtype for key, value in norm.items() if key != "step"} == {torch.bfloat16}
    else:
        assert kinds == {torch.uint8, torch.float32}
        assert {value.dtype for value in norm.values()} == {torch.float32}


def test_float32_is_torch_as_it_is():
    plain, named = session(job(optimizer=Optimizer())), session(asked("fp32", decoder=job().decoder, lr=0.1))
    assert type(named.optimizer) is torch.optim.AdamW
    assert named.states is None
    assert train_step(plain, window(5, 9)) == train_step(named, window(5, 9))
    assert same(state(plain), state(named))


def held_bytes(ours):
    return sum(v.nbytes for s in ours.optimizer.state.values() for key, v in s.items() if key != "step")


@LOW
def test_what_was_done_is_said_in_numbers_that_are_measured(format):
    ours = session(asked(format))
    train_step(ours, window(9))
    sizes = [parameter.numel() for parameter in ours.model.parameters()]
    wide = 8 * sum(sizes)
    said = ours.applied["optimizer_states"]
    assert said.endswith(f"{held_bytes(ours) / 2**20:.3g} MiB of states, {wide / 2**20:.3g} MiB in float32")
    if format == "8bit":
        large = [p.numel() for p in ours.model.parameters() if p.ndim == 2 and p.numel() >= 4096]
        assert 0 < len(large) < len(sizes)
        assert said.startswith(f"{len(large)} of {len(sizes)} tensors ({sum(large) / sum(sizes):.1%} of the elements)")


@LOW
def test_a_rehearsal_knows_their_bytes(format):
    ours = session(asked(format, micro_batch=4))
    train_step(ours, window(9, samples=4))
    steps = 4 * len(ours.optimizer.state)
    rehearsed = rehearse(asked(format, micro_batch=4), VOCABULARY)
    assert rehearsed.trace.at_end[OPTIMIZER_STATES] == held_bytes(ours) + steps
    assert rehearsed.applied == ours.applied


@LOW
def test_with_bfloat16_parameters_too(format):
    ours = session(asked(format, Precision(mode="bf16-pure", rounding="compensated")))
    for _ in range(2):
        assert train_step(ours, window(9)).taken
    assert {p.dtype for p in ours.model.parameters()} == {torch.bfloat16}
    assert {s["compensation"].dtype for s in ours.optimizer.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("others", [(), (Precision(mode="bf16-pure", rounding="stochastic"),)])
@LOW
def test_a_checkpoint_keeps_them_to_the_bit(format, others, tmp_path):
    whole, again = (session(asked(format, *others)) for _ in range(2))
    train_step(whole, window(9))
    path = save(whole, tmp_path, corpus="0" * 64, metrics_rows=0)
    restore(again, path, "0" * 64)
    assert same(state(whole), state(again))
    for ours in (whole, again):
        assert train_step(ours, window(11, seed=1)).taken
    assert same(state(whole), state(again))
    with pytest.raises(UsageError, match="optimizer_states"):
        restore(session(asked("fp32", *others)), path, "0" * 64)


def refused(technique, **optimizer):
    return list(technique.refuse(job(optimizer=Optimizer(**optimizer))))


@LOW
def test_refusals_say_why_and_what_instead(format):
    technique = OptimizerStates(format=format)
    (problem,) = refused(technique, name="muon")
    assert (problem.key, problem.value) == ("optimizer_states", format)
    assert "Muon" in problem.why
    assert 'optimizer.name = "adamw"' in problem.fix
    for name in ("sgd", "lars"):
        (problem,) = refused(technique, name=name, momentum=0.0)
        assert f"{name} with momentum = 0 has no state" in problem.why
        assert "optimizer.momentum = 0.9" in problem.fix
    for implementation in ("fused", "foreach"):
        (problem,) = refused(technique, implementation=implementation)
        assert (problem.key, problem.value) == ("optimizer.implementation", implementation)
        assert 'implementation = "auto"' in problem.fix
    for fine in ({}, {"name": "lamb"}, {"name": "sgd"}, {"name": "lars"}, {"implementation": "loop"}):
        assert not refused(technique, **fine)


def test_a_decay_too_slow_for_bfloat16_is_refused():
    (problem,) = refused(OptimizerStates(format="bf16"), betas=(0.9, 0.999))
    assert (problem.key, problem.value) == ("optimizer.betas", [0.9, 0.999])
    assert "never fall" in problem.why
    assert "8bit" in problem.fix
    assert "betas = [0.9, 0.95]" in problem.fix
    (problem,) = refused(OptimizerStates(format="bf16"), name="sgd", momentum=0.999)
    assert problem.key == "optimizer.momentum"
    assert not refused(OptimizerStates(format="bf16"), betas=(0.9, 0.99))
    assert not refused(OptimizerStates(format="8bit"), betas=(0.9, 0.999))


@pytest.mark.parametrize("wrong", [{"name": "muon"}, {"implementation": "fused"}, {"betas": (0.9, 0.999)}])
def test_float32_refuses_nothing(wrong):
    assert not refused(OptimizerStates(format="fp32"), **wrong)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(nn.Linear(63, 65), nn.Linear(65, 3)), "the largest matrix has 4,095 elements"),
        (nn.LayerNorm(8192), "there is no matrix"),
    ],
)
def test_8_bits_that_would_serve_nothing_are_refused_with_the_sizes(model, why):
    with pytest.raises(ConfigError) as error:
        compose(asked("8bit"), vocabulary=VOCABULARY, device=CPU, model=model)
    assert "optimizer_states = '8bit'" in str(error.value)
    assert "4,096 elements" in str(error.value)
    assert why in str(error.value)
    assert 'optimizer_states = "bf16"' in str(error.value)


def test_claims():
    claims = {one.format: (one.claim(), one.arithmetic()) for one in OptimizerStates.examples()}
    assert claims == {
        "fp32": (Claim.BITWISE, None),
        "bf16": (Claim.LOWER_PRECISION, Arithmetic(states="bf16")),
        "8bit": (Claim.LOWER_PRECISION, Arithmetic(states="8bit")),
    }
    assert not [problem for example in OptimizerStates.examples() for problem in example.check()]


def test_muon_in_pure_bfloat16_is_refused():
    (problem,) = Precision(mode="bf16-pure").refuse(job(optimizer=Optimizer(name="muon")))
    assert (problem.key, problem.value) == ("optimizer.name", "muon")
    assert 'precision = "bf16"' in problem.fix
    for mode in ("fp32", "bf16"):
        assert not list(Precision(mode=mode).refuse(job(optimizer=Optimizer(name="muon"))))
