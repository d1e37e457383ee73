"""The optimizers of a job against updates written out by hand, and what decays."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from thrice.errors import ConfigError
from thrice.model.decoder import build_decoder
from thrice.optim.build import build_optimizer, parameter_groups
from thrice.optim.stored import StoredAdamW, StoredSGD
from thrice.spec.job import Decoder, Optimizer

LR, STEPS = 0.01, 5


class Mixed(nn.Module):
    """A matrix, a bias, a norm, and a frozen matrix."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)


def model():
    torch.manual_seed(0)
    return Mixed()


def gradients(step, of):
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(parameter.shape, generator=generator)
        for name, parameter in of.named_parameters()
        if parameter.requires_grad
    }


def run(of, optimizer, rates):
    for step, lr in enumerate(rates):
        for name, gradient in gradients(step, of).items():
            of.get_parameter(name).grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return dict(of.named_parameters())


def by_hand(of, spec, rates):
    """arXiv:1711.05101 algorithm 2 (AdamW), and SGD with momentum, in float64."""
    values = {name: p.detach().double().clone() for name, p in of.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in values.items()}
    second = {name: torch.zeros_like(value) for name, value in values.items()}
    for step, lr in enumerate(rates):
        for name, gradient in gradients(step, of).items():
            g, w = gradient.double(), values[name]
            decay = spec.weight_decay if w.ndim >= 2 else 0.0
            if spec.name == "sgd":
                g = g + decay * w
                first[name] = spec.momentum * first[name] + g
                values[name] = w - lr * first[name]
                continue
            b1, b2 = spec.betas
            first[name] = b1 * first[name] + (1 - b1) * g
            second[name] = b2 * second[name] + (1 - b2) * g * g
            mean, square = first[name] / (1 - b1 ** (step + 1)), second[name] / (1 - b2 ** (step + 1))
            values[name] = w - lr * decay * w - lr * mean / (square.sqrt() + spec.eps)
    return values


SPECS = {
    "adamw": Optimizer(name="adamw", betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3),
    "sgd": Optimizer(name="sgd", momentum=0.7, weight_decay=0.3),
    "sgd without momentum": Optimizer(name="sgd", momentum=0.0, weight_decay=0.3),
}
RATES = [LR * (1 + step) for step in range(STEPS)]


@pytest.mark.parametrize("implementation", ["auto", "fused", "foreach", "loop"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_updates_equal_those_by_hand(spec, implementation):
    ours = model()
    spec = Optimizer(**{**spec.__dict__, "implementation": implementation})
    expected = by_hand(ours, spec, RATES)
    optimizer = build_optimizer(ours, spec, lr=LR, seed=0)
    assert type(optimizer) is (torch.optim.AdamW if spec.name == "adamw" else torch.optim.SGD)
    fused = optimizer.param_groups[0]["fused"]
    assert bool(fused) == (implementation in ("auto", "fused"))
    assert bool(optimizer.param_groups[0]["foreach"]) == (implementation == "foreach")
    for name, got in run(ours, optimizer, RATES).items():
        # values below 1, five updates: some ten roundings of 2⁻²⁴
        assert torch.allclose(got.detach().double(), expected[name], rtol=0, atol=1e-6), name


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_hand_written_update_can_tell(name):
    """Decay on a vector, or added to AdamW's gradient, is not within the tolerance above."""
    spec = SPECS[name]
    ours = model()
    expected = by_hand(ours, spec, RATES)
    kind = torch.optim.Adam if name == "adamw" else torch.optim.SGD
    more = {"betas": spec.betas, "eps": spec.eps} if name == "adamw" else {"momentum": spec.momentum}
    parameters = [p for p in ours.parameters() if p.requires_grad]
    got = run(ours, kind(parameters, lr=LR, weight_decay=spec.weight_decay, **more), RATES)
    assert (got["norm.weight"].detach().double() - expected["norm.weight"]).abs().max() > 1e-3


def test_matrices_decay_and_vectors_do_not():
    decoder = build_decoder(
        Decoder(layers=2, hidden=16, heads=2, tied=True), vocabulary=11, positions=8, device=torch.device("cpu"), seed=0
    )
    decay, no_decay = parameter_groups(decoder, 0.2)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.2, 0.0)
    names = dict(decoder.named_parameters())
    assert {name for name, _ in no_decay["params"]} == {name for name in names if name.endswith("norm.weight")}
    assert len(decay["params"]) + len(no_decay["params"]) == len(names)  # each once, the tied one too
    mixed = model()
    decay, no_decay = parameter_groups(mixed, 0.2)
    assert [(name, id(p)) for name, p in decay["params"]] == [("linear.weight", id(mixed.linear.weight))]
    assert {id(p) for _, p in no_decay["params"]} == {id(p) for p in (mixed.linear.bias, *mixed.norm.parameters())}


def test_frozen_parameters_stay():
    ours = model()
    before = copy.deepcopy(ours.frozen.state_dict())
    run(ours, build_optimizer(ours, Optimizer(), lr=LR, seed=0), RATES)
    assert all(torch.equal(before[name], tensor) for name, tensor in ours.frozen.state_dict().items())


@pytest.mark.parametrize("rounding", [None, "stochastic"])
def test_a_model_with_nothing_to_train_is_refused(rounding):
    with pytest.raises(ConfigError, match="nothing to train") as error:
        build_optimizer(model().requires_grad_(False), Optimizer(), lr=LR, seed=0, rounding=rounding)
    assert "Mixed" in str(error.value)


@pytest.mark.parametrize(("name", "kind"), [("adamw", StoredAdamW), ("sgd", StoredSGD)])
def test_rounding_asks_for_our_own(name, kind):
    ours = model().to(torch.bfloat16)
    spec = Optimizer(name=name, betas=(0.7, 0.8), eps=1e-5, momentum=0.3, weight_decay=0.2)
    optimizer = build_optimizer(ours, spec, lr=LR, seed=9, rounding="compensated")
    assert type(optimizer) is kind
    assert (optimizer.rounding, optimizer.seed) == ("compensated", 9)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    for group in optimizer.param_groups:
        assert group["lr"] == LR
        if name == "adamw":
            assert (group["betas"], group["eps"]) == ((0.7, 0.8), 1e-5)
        else:
            assert group["momentum"] == 0.3


def test_the_default_is_what_the_job_says():
    optimizer = build_optimizer(model(), Optimizer(), lr=LR, seed=0)
    group = optimizer.param_groups[0]
    assert math.isclose(group["lr"], LR)
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-8, 0.1)
