"""LAMB and LARS against their papers' formulas in float64, and against another library, each difference explained."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from thrice.optim.lamb import Lamb
from thrice.optim.lars import Lars

SHAPES = {"matrix": (6, 5), "kernel": (3, 2, 2, 2), "bias": (5,), "scale": ()}
LAMB = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
LARS = {"momentum": 0.7, "weight_decay": 0.3, "trust_coefficient": 0.02}
RATES = [0.05, 0.1, 0.02, 0.2, 0.1, 0.1]


def parameters(shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def gradient(step, index, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + index))


def run(optimizer, of, rates=RATES, gradients=gradient):
    for step, lr in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for index, parameter in enumerate(of.values()):
            parameter.grad = gradients(step, index, parameter.shape).to(parameter.dtype)
        optimizer.step()
    return {name: parameter.detach().double() for name, parameter in of.items()}


def lamb_by_hand(of, rates=RATES, gradients=gradient):
    """arXiv:1904.00962 algorithm 2, in float64; vectors are updated as by Adam."""
    (b1, b2), eps = LAMB["betas"], LAMB["eps"]
    found = {}
    for index, (name, parameter) in enumerate(of.items()):
        w = parameter.detach().double().clone()
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for step, lr in enumerate(rates):
            g = gradients(step, index, w.shape).double()
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g**2
            update = (m / (1 - b1 ** (step + 1))) / ((v / (1 - b2 ** (step + 1))).sqrt() + eps)
            if w.ndim < 2:
                w = w - lr * update
                continue
            update = update + LAMB["weight_decay"] * w
            trust = float(w.norm() / update.norm()) if w.norm() > 0 and update.norm() > 0 else 1.0
            w = w - lr * trust * update
        found[name] = w
    return found


def lars_by_hand(of, rates=RATES, gradients=gradient):
    """arXiv:1708.03888 algorithm 1, in float64; vectors are updated as by SGD with momentum."""
    found = {}
    for index, (name, parameter) in enumerate(of.items()):
        w = parameter.detach().double().clone()
        v = torch.zeros_like(w)
        for step, lr in enumerate(rates):
            g = gradients(step, index, w.shape).double()
            local, decay = 1.0, 0.0
            if w.ndim >= 2:
                decay = LARS["weight_decay"]
                if w.norm() > 0 and g.norm() > 0:
                    local = float(LARS["trust_coefficient"] * w.norm() / (g.norm() + decay * w.norm()))
            v = LARS["momentum"] * v + lr * local * (g + decay * w)
            w = w - v
        found[name] = w
    return found


KINDS = {"lamb": (Lamb, LAMB, lamb_by_hand), "lars": (Lars, LARS, lars_by_hand)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_are_the_papers(kind, dtype):
    ours, settings, by_hand = KINDS[kind]
    held = parameters(dtype=dtype)
    expected = by_hand(held)
    got = run(ours(held.values(), **settings), held)
    # values about 1 and six updates: some ten roundings of 2⁻²⁴ for each; a float64 parameter is updated in float64
    allowed = 2e-6 if dtype is torch.float32 else 1e-12
    for name in SHAPES:
        assert torch.allclose(got[name], expected[name], rtol=0, atol=allowed), name
        assert held[name].dtype is dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("weight", "slope"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_the_ratio_is_1_where_a_norm_is_0(kind, weight, slope):
    ours, settings, _ = KINDS[kind]
    settings = {**settings, "weight_decay": 0.0}  # with decay, LAMB's update has a norm where the gradient has none
    held = {"matrix": nn.Parameter(torch.full((3, 4), weight))}

    def gradients(step, index, shape):
        return torch.full(shape, slope)

    got = run(ours(held.values(), **settings), held, [0.1], gradients)["matrix"]
    moved = {"lamb": 1.0 / (1.0 + LAMB["eps"]), "lars": 1.0}[kind] * 0.1 * slope if weight == 0 else 0.0
    assert torch.allclose(got, torch.full((3, 4), weight - moved, dtype=torch.float64), rtol=0, atol=1e-7)


def test_decay_alone_is_a_step_of_its_own_ratio():
    """No gradient but decay: LAMB's update is the weight itself, its ratio 1 / decay; LARS's λ is 1."""
    for kind, left in (("lamb", 1 - 0.1), ("lars", 1 - 0.1 * 0.3)):
        ours, settings, _ = KINDS[kind]
        held = {"matrix": nn.Parameter(torch.ones(3, 4))}
        got = run(ours(held.values(), **settings), held, [0.1], lambda step, index, shape: torch.zeros(shape))["matrix"]
        assert torch.allclose(got, torch.full((3, 4), left, dtype=torch.float64), rtol=0, atol=1e-7), kind


@pytest.mark.parametrize("kind", KINDS)
def test_groups_have_settings_of_their_own(kind):
    ours, settings, _ = KINDS[kind]
    held, alone = parameters(), parameters()
    groups = [
        {"params": [("matrix", held["matrix"])], "weight_decay": 0.0},
        {"params": [("kernel", held["kernel"]), ("bias", held["bias"])]},
        {"params": [("scale", held["scale"])], "lr": 3.0},
    ]
    together = ours(groups, lr=0.1, **settings)
    for index, (name, parameter) in enumerate(alone.items()):
        own = {**settings, **({"weight_decay": 0.0} if name == "matrix" else {})}
        single = ours([parameter], lr=3.0 if name == "scale" else 0.1, **own)
        held[name].grad = gradient(0, index, parameter.shape)
        parameter.grad = gradient(0, index, parameter.shape)
        single.step()
    together.step()
    assert all(torch.equal(held[name], alone[name]) for name in SHAPES)


def test_lamb_beside_pytorch_optimizer():
    """Theirs corrects no second moment, and divides the step by the first's correction, outside the trust ratio: its
    rate is lr / (1 - β1^t), which is taken back here. It clamps a weight's norm at 10 (norms here are below), adds
    eps to the norm in the ratio (negligible here), decays weights before the update (no decay here), and takes a
    ratio for vectors too. What is left is the same for matrices: the second correction is a factor of the whole
    update, and the ratio takes it out."""
    library = pytest.importorskip("pytorch_optimizer")
    shapes = {"matrix": (6, 5), "kernel": (3, 2, 2, 2)}
    mine, other = parameters(shapes), parameters(shapes)
    settings = {"betas": (0.8, 0.9), "eps": 1e-12, "weight_decay": 0.0}
    got = run(Lamb(mine.values(), **settings), mine)
    taken_back = [lr * (1 - 0.8 ** (step + 1)) for step, lr in enumerate(RATES)]
    theirs = run(library.Lamb(other.values(), **settings), other, taken_back)
    for name in shapes:
        assert torch.allclose(got[name], theirs[name], rtol=0, atol=2e-6), name
    # a vector shows the difference
    vector, same = parameters({"bias": (5,)}), parameters({"bias": (5,)})
    got = run(Lamb(vector.values(), **settings), vector)["bias"]
    assert not torch.allclose(
        got, run(library.Lamb(same.values(), **settings), same, taken_back)["bias"], rtol=0, atol=1e-3
    )


def test_lars_beside_pytorch_optimizer():
    """Theirs multiplies by lr outside the momentum: the same while lr is constant, and only then."""
    library = pytest.importorskip("pytorch_optimizer")
    shapes = {"matrix": (6, 5), "kernel": (3, 2, 2, 2), "bias": (5,)}
    for rates, equal in (([0.1] * 6, True), (RATES, False)):
        mine, other = parameters(shapes), parameters(shapes)
        got = run(Lars(mine.values(), **LARS), mine, rates)
        theirs = run(library.LARS(other.values(), **LARS), other, rates)
        for name in shapes:
            assert torch.allclose(got[name], theirs[name], rtol=0, atol=2e-6) is equal, (name, rates)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_does_not_depend_on_the_gradients_scale(kind):
    """What the trust ratio is for: layers of any scale of gradient move by the same share of their norm."""
    ours, settings, _ = KINDS[kind]
    settings = {**settings, "weight_decay": 0.0}
    small, large = ({"matrix": parameters()["matrix"]} for _ in range(2))
    lr = 0.1
    scaled = [
        run(
            ours(held.values(), **settings),
            held,
            [lr],
            lambda step, index, shape, s=s: s * gradient(step, index, shape),
        )
        for held, s in ((small, 1.0), (large, 1e4))
    ]
    # LAMB's eps of 1e-6 is 1e-4 of the smallest gradients, and an update is a tenth of that
    assert torch.allclose(scaled[0]["matrix"], scaled[1]["matrix"], rtol=0, atol=1e-5 if kind == "lamb" else 1e-6)
    before = parameters()["matrix"].detach().double()
    share = lr * (1.0 if kind == "lamb" else settings["trust_coefficient"])
    assert float((scaled[1]["matrix"] - before).norm() / before.norm()) == pytest.approx(share, rel=1e-4)


def large_batch(optimizer_of, lr, steps=30):
    """Loss of a network whose layers differ in scale by 1,000, on one batch of 2,048 samples after a few long steps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 20, generator=generator)
    y = torch.tanh(x @ torch.randn(20, 4, generator=generator) / 20**0.5)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        model[2].weight.mul_(100.0)
        model[0].weight.mul_(0.1)
    optimizer = optimizer_of(model.parameters(), lr)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def test_few_long_steps_get_further_than_sgds():
    """At the best of a range of rates each; SGD has one for all layers, and some layer is always wrong."""
    kinds = {
        "sgd": lambda held, lr: torch.optim.SGD(held, lr=lr),
        "lars": lambda held, lr: Lars(held, lr=lr, momentum=0.0, trust_coefficient=1.0),
        "lamb": lambda held, lr: Lamb(held, lr=lr, weight_decay=0.0),
    }
    best = {
        kind: min(large_batch(optimizer_of, lr)[-1] for lr in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1))
        for kind, optimizer_of in kinds.items()
    }
    # seen: 55, 8 and 6
    assert best["lars"] < best["sgd"] / 3
    assert best["lamb"] < best["sgd"] / 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [{}, {"states": "bf16"}, {"states": "8bit"}])
def test_resumed_from_a_state_dict_it_goes_on_bitwise(kind, how):
    ours, settings, _ = KINDS[kind]
    shapes = {"matrix": (80, 60), "bias": (5,)}
    whole, parted = parameters(shapes), parameters(shapes)
    first = ours(whole.values(), **settings, **how)
    run(first, whole, RATES[:3])
    run(first, whole, RATES[3:])
    run(half := ours(parted.values(), **settings, **how), parted, RATES[:3])
    again = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parted.items()}
    other = ours(again.values(), **settings, **how)
    other.load_state_dict(copy.deepcopy(half.state_dict()))
    run(other, again, RATES[3:])
    assert all(torch.equal(whole[name], again[name]) for name in shapes)
