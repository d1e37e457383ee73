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
from thrice.optim.composite import Composite
from thrice.optim.lamb import Lamb
from thrice.optim.lars import Lars
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


def decoder(seed=0):
    shape = Decoder(layers=2, hidden=32, heads=2, tied=True)
    return build_decoder(shape, vocabulary=200, positions=8, device=torch.device("cpu"), seed=seed)


def test_names_go_with_the_groups():
    of = decoder()
    optimizer = build_optimizer(of, Optimizer(), lr=LR, seed=0)
    named = dict(of.named_parameters())
    for group in optimizer.param_groups:
        assert all(named[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(named)


@pytest.mark.parametrize(
    ("spec", "kind", "settings"),
    [
        (
            Optimizer(name="lamb", betas=(0.7, 0.8), eps=1e-5, weight_decay=0.2),
            Lamb,
            {"betas": (0.7, 0.8), "eps": 1e-5},
        ),
        (Optimizer(name="lars"), Lars, {"momentum": 0.9, "trust_coefficient": 0.001}),
        (
            Optimizer(name="lars", momentum=0.0, trust_coefficient=0.02),
            Lars,
            {"momentum": 0, "trust_coefficient": 0.02},
        ),
    ],
)
def test_lamb_and_lars_get_what_the_job_says(spec, kind, settings):
    optimizer = build_optimizer(model(), spec, lr=LR, seed=0, states="bf16", rounding="compensated")
    assert type(optimizer) is kind
    assert (optimizer.states, optimizer.rounding) == ("bf16", "compensated")
    assert [group["weight_decay"] for group in optimizer.param_groups] == [spec.weight_decay, 0.0]
    assert all(group[key] == value for group in optimizer.param_groups for key, value in settings.items())


@pytest.mark.parametrize(("name", "kind"), [("adamw", StoredAdamW), ("sgd", StoredSGD)])
def test_low_precision_states_ask_for_our_own(name, kind):
    optimizer = build_optimizer(decoder(), Optimizer(name=name), lr=LR, seed=0, states="8bit")
    assert (type(optimizer), optimizer.states, optimizer.rounding) == (kind, "8bit", None)


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest():
    of = decoder()
    optimizer = build_optimizer(of, Optimizer(name="muon", betas=(0.8, 0.9), weight_decay=0.2), lr=LR, seed=0)
    muon, adamw = optimizer.parts
    assert (type(muon), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW)
    assert {n for g in muon.param_groups for n in g["param_names"]} == {
        name for name, p in of.named_parameters() if name.startswith("blocks.") and p.ndim == 2
    }
    assert {n for g in adamw.param_groups for n in g["param_names"]} == {
        name for name, p in of.named_parameters() if not name.startswith("blocks.") or p.ndim < 2
    }
    (group,) = muon.param_groups
    assert (group["momentum"], group["weight_decay"], group["adjust_lr_fn"]) == (0.95, 0.2, "match_rms_adamw")
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.2, 0.0]
    assert adamw.param_groups[0]["fused"]


def test_muon_moves_a_matrix_as_far_as_adamw_would():
    """So that one learning rate serves both: an element's update is about 0.2 lr, whatever the shape."""
    of = decoder()
    before = {name: p.detach().clone() for name, p in of.named_parameters()}
    optimizer = build_optimizer(of, Optimizer(name="muon", weight_decay=0.0), lr=LR, seed=0)
    after = run(of, optimizer, [LR])
    for name, p in after.items():
        rms = float((p.detach() - before[name]).square().mean().sqrt()) / LR
        if name.startswith("blocks.") and p.ndim == 2:
            # 5 steps of Newton-Schulz leave singular values between 0.7 and 1.2
            assert 0.2 * 0.6 < rms < 0.2 * 1.3, name
        else:
            assert rms == pytest.approx(1.0, rel=1e-3), name  # AdamW's first update is the sign


def test_muon_refuses_what_it_cannot_do():
    for how in ({"states": "8bit"}, {"rounding": "stochastic"}):
        with pytest.raises(ConfigError, match="float32 states") as error:
            build_optimizer(decoder(), Optimizer(name="muon"), lr=LR, seed=0, **how)
        assert 'optimizer.name = "adamw"' in str(error.value)
    frozen = decoder()
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(not name.startswith("blocks."))
    with pytest.raises(ConfigError, match="none to train there"):
        build_optimizer(frozen, Optimizer(name="muon"), lr=LR, seed=0)


NAMES = ("adamw", "sgd", "lamb", "lars", "muon")


STORED = ({"states": "8bit"}, {"states": "bf16", "rounding": "stochastic"})


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, {}) for name in NAMES] + [(name, how) for name in NAMES if name != "muon" for how in STORED],
)
def test_in_backward_there_is_one_part_for_each_parameter_with_the_same_updates(name, how):
    dtype = torch.bfloat16 if "rounding" in how else torch.float32
    whole, parted = decoder().to(dtype), decoder().to(dtype)
    one = build_optimizer(whole, Optimizer(name=name), lr=LR, seed=4, **how)
    many = build_optimizer(parted, Optimizer(name=name), lr=LR, seed=4, in_backward=True, **how)
    assert type(many) is Composite
    assert [len(part.param_groups) for part in many.parts] == [1] * len(list(parted.parameters()))
    assert all(len(part.param_groups[0]["params"]) == 1 for part in many.parts)
    for of in (whole, parted):
        for parameter in of.parameters():
            parameter.grad_dtype = torch.float32
    expected, got = run(whole, one, RATES), run(parted, many, RATES)
    assert all(torch.equal(expected[n], got[n]) for n in expected)


@pytest.mark.parametrize(
    ("wrong", "key", "fix"),
    [
        ({"name": "adamw", "momentum": 0.9}, "momentum", "betas = [0.9, 0.95]"),
        ({"name": "lamb", "momentum": 0.9}, "momentum", "betas"),
        ({"name": "sgd", "trust_coefficient": 0.1}, "trust_coefficient", 'name = "lars"'),
        ({"name": "lars", "implementation": "fused"}, "implementation", 'implementation = "auto"'),
        ({"name": "muon", "implementation": "foreach"}, "implementation", 'implementation = "auto"'),
        ({"name": "sgd", "betas": (0.8, 0.95)}, "betas", "momentum = 0.8"),
        ({"name": "lars", "eps": 1e-6}, "eps", "leave it out"),
    ],
)
def test_combinations_that_make_no_sense_are_problems(wrong, key, fix):
    (problem,) = Optimizer(**wrong).check()
    assert (problem.key, problem.value) == (key, wrong[key])
    assert fix in problem.fix
    assert wrong["name"] in problem.why


def test_every_optimizer_is_fine_as_it_is():
    assert not [problem for name in NAMES for problem in Optimizer(name=name).check()]
