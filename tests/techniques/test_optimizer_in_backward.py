"""Updates within backward: the same bits, the gradients' memory, and what cannot be had with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from plain import VOCABULARY, gradients_taken, job, same, state, window
from runs import tiny
from thrice import checkpoint
from thrice.compose import compose, refuse
from thrice.errors import ConfigError, Diverged, Spoilt
from thrice.observe.trace import GRADIENTS, Tracer
from thrice.spec.job import BatchRamp, Decoder, Optimizer
from thrice.step import train_step
from thrice.techniques.optimizer_in_backward import OptimizerInBackward
from thrice.techniques.optimizer_states import OptimizerStates
from thrice.techniques.precision import Precision
from thrice.train import train

ON = OptimizerInBackward(enabled=True)
WIDE = Decoder(layers=4, hidden=64, heads=4, tied=True)


def uncut(name: str = "adamw", *techniques: object, **changes: object):
    optimizer = Optimizer(name=name, clip=None)
    wanted = {"decoder": WIDE, "micro_batch": 4, "lr": 1e-3, "optimizer": optimizer, "techniques": techniques}
    return job(**{**wanted, **changes})


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lars", "muon"])
def test_the_same_bits_as_at_the_end(name: str) -> None:
    """A tied embedding included: its hook runs once, when both uses have added their share."""
    within = compose(uncut(name, ON), vocabulary=VOCABULARY)
    after = compose(uncut(name), vocabulary=VOCABULARY)
    for step in range(3):
        one, other = (train_step(session, window(40, seed=step, samples=4)) for session in (within, after))
        assert (one.loss, one.grad_norm, one.lr) == (other.loss, other.grad_norm, other.lr)
    assert same(state(within), state(after))
    assert all(parameter.grad is None for parameter in within.model.parameters())


@pytest.mark.parametrize("precision", [Precision(mode="bf16"), Precision(mode="bf16-pure", rounding="stochastic")])
def test_the_same_bits_in_low_precision_with_states_in_8_bits(precision: Precision) -> None:
    parts = (precision, OptimizerStates(format="8bit"))
    within = compose(uncut("adamw", *parts, ON), vocabulary=VOCABULARY)
    after = compose(uncut("adamw", *parts), vocabulary=VOCABULARY)
    for step in range(3):
        for session in (within, after):
            train_step(session, window(40, seed=step, samples=4))
    assert same(state(within), state(after)), "rounding noise goes by name and step, not by the order of updates"


def test_gradients_never_exist_at_once() -> None:
    peaks = []
    for techniques in ((), (ON,)):
        session = compose(uncut("sgd", *techniques), vocabulary=VOCABULARY)
        train_step(session, window(40, samples=4))
        with Tracer(session.model, session.optimizer) as tracer:
            train_step(session, window(40, samples=4))
        peaks.append(max(point.bytes[GRADIENTS] for point in tracer.trace().timeline))
    sizes = [parameter.numel() * 4 for parameter in session.model.parameters()]
    assert peaks[0] == sum(sizes)
    # autograd hands some on before it has them all: no more than a block's largest few
    assert peaks[1] <= 3 * max(sizes) < sum(sizes) / 4


def test_every_parameter_is_updated_once_a_step() -> None:
    session = compose(uncut("adamw", ON), vocabulary=VOCABULARY)
    taken = gradients_taken(session)
    for _ in range(2):
        train_step(session, window(40, samples=4))
    assert {float(states["step"]) for states in session.optimizer.state.values()} == {2.0}
    assert taken.keys() == dict(session.model.named_parameters()).keys()


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"optimizer": Optimizer(clip=1.0)}, "optimizer.clip", "norm of the whole gradient before the first update"),
        ({"micro_batch": 1}, "optimizer_in_backward", "4 micro-batches add up to one gradient"),
        ({"micro_batch": 1, "batch_ramp": BatchRamp(start=1, samples=8)}, "batch_ramp.start", "every step to be one"),
        ({"techniques": (ON, Precision(mode="fp16"))}, "optimizer_in_backward", "skips the whole step"),
    ],
)
def test_what_it_refuses(changes: dict[str, object], key: str, words: str) -> None:
    (problem,) = refuse(replace(uncut("adamw", ON), **changes))
    assert problem.key == key
    assert words in problem.why
    assert problem.fix
    with pytest.raises(ConfigError):
        compose(replace(uncut("adamw", ON), **changes), vocabulary=VOCABULARY)


def test_a_loss_that_is_not_finite_updates_nothing() -> None:
    session = compose(uncut("adamw", ON), vocabulary=VOCABULARY)
    train_step(session, window(40, samples=4))
    before = state(session)
    session.loss = lambda logits, targets: logits.float().sum() * float("nan")
    with pytest.raises(Diverged) as caught:
        train_step(session, window(40, samples=4))
    assert not isinstance(caught.value, Spoilt)
    assert same(state(session), before)


class _Spoils(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def spoil(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, __, output: _Spoils.apply(output))


def test_a_gradient_that_is_not_finite_is_said_and_not_saved(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    session = compose(uncut("adamw", ON), vocabulary=VOCABULARY)
    spoil(session.model.blocks[1])
    with pytest.raises(Spoilt, match="go back to a checkpoint"):
        train_step(session, window(40, samples=4))
    run = tiny(corpus, tmp_path / "run", micro_batch=48, techniques=(ON,), optimizer=Optimizer(clip=None))
    composed = compose

    def spoiling(job, **options):
        made = composed(job, **options)
        spoil(made.model.blocks[0])
        return made

    monkeypatch.setattr("thrice.train.compose", spoiling)
    with pytest.raises(Spoilt):
        train(run, say=lambda line: None)
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*")), "spoilt parameters are no state to keep"


def test_resumed_with_it_or_without(tmp_path: Path) -> None:
    """The states go by the parameters' names, whatever the optimizer is made of."""
    first = compose(uncut("adamw", ON), vocabulary=VOCABULARY)
    train_step(first, window(40, samples=4))
    path = checkpoint.save(first, tmp_path, corpus="c", metrics_rows=0)
    train_step(first, window(33, seed=1, samples=4))
    for techniques in ((ON,), ()):
        second = compose(uncut("adamw", *techniques), vocabulary=VOCABULARY)
        checkpoint.restore(second, path, "c")
        train_step(second, window(33, seed=1, samples=4))
        assert same(state(second), state(first))
