"""Updates of bfloat16 parameters: right on average or compensated, reproducible, without a float32 model."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from torch import nn

from thrice.observe.trace import Tracer
from thrice.optim.lamb import Lamb
from thrice.optim.lars import Lars
from thrice.optim.stored import StoredAdamW, StoredSGD, round_stochastically

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}
KINDS = {"adamw": (StoredAdamW, torch.optim.AdamW, ADAMW), "sgd": (StoredSGD, torch.optim.SGD, SGD)}
ROUNDINGS = ("stochastic", "compensated")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def parameters(dtype=torch.bfloat16):
    values = [torch.randn(shape, generator=seeded(i)).to(torch.bfloat16) for i, shape in enumerate([(40, 30), (50,)])]
    return [nn.Parameter(value.to(dtype)) for value in values]


def run(optimizer, steps, first=0):
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        for index, parameter in enumerate(held):
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.randn(parameter.shape, generator=seeded(1000 * step + index))
        optimizer.step()
    return held


@pytest.mark.parametrize("value", [1.0 + 2.0**-9, -1.0 - 3 * 2.0**-10, 3e-5, -7.7e20, 3 * 2.0**-134])
def test_stochastic_rounding_is_right_on_average(value):
    draws = 1 << 16
    x = torch.full((draws,), value)
    rounded = round_stochastically(x, seeded(0))
    below, above = sorted({float(v) for v in rounded.unique()})
    exact = float(x[0])
    assert below < exact < above
    share = (exact - below) / (above - below)
    # the mean of 65,536 draws with that probability lies within 5 of its standard deviations
    deviation = (above - below) * (share * (1 - share) / draws) ** 0.5
    assert abs(float(rounded.double().mean()) - exact) < 5 * deviation
    neighbour = torch.nextafter(torch.tensor(below, dtype=torch.bfloat16), torch.tensor(above, dtype=torch.bfloat16))
    assert float(neighbour) == above


def test_what_bfloat16_holds_is_left_as_it_is():
    x = torch.cat([torch.randn(1000, generator=seeded(0)), torch.tensor([0.0, -0.0, 1.0, -256.0])]).to(torch.bfloat16)
    for seed in range(20):
        assert torch.equal(round_stochastically(x.float(), seeded(seed)).view(torch.int16), x.view(torch.int16))


def test_a_transposed_tensor_keeps_its_places():
    x = torch.arange(12, dtype=torch.float32).view(3, 4).t()
    assert torch.equal(round_stochastically(x, seeded(0)).float(), x)


@pytest.mark.parametrize("name", KINDS)
def test_the_stored_sum_tracks_float32(name):
    """Weight and compensation together are the float32 optimizer's weight, to 16 bits."""
    ours, torchs, settings = KINDS[name]
    optimizer = ours(parameters(), **settings, rounding="compensated", seed=0)
    expected = run(torchs(parameters(torch.float32), **settings, foreach=False), 200)
    for got, wanted in zip(run(optimizer, 200), expected, strict=True):
        weight, rest = got.detach().double(), optimizer.state[got]["compensation"].double()
        assert bool((rest.abs() <= 2.0**-8 * weight.abs()).all())  # half a unit of the weight at the most
        # so each of 200 updates loses at most 2⁻⁹ of that, of either sign: together some √200 times as much
        wanted = wanted.detach().double()
        error = (weight + rest - wanted) / wanted.abs().clamp_min(0.1)
        assert float(error.pow(2).mean().sqrt()) < 200**0.5 * 2.0**-17
        # the weight alone is a whole rounding off
        assert float(((weight - wanted) / wanted.abs().clamp_min(0.1)).pow(2).mean().sqrt()) > 200**0.5 * 2.0**-17


@pytest.mark.parametrize("name", KINDS)
def test_stochastic_updates_are_right_on_average(name):
    ours, torchs, settings = KINDS[name]

    def wide(dtype):
        return [nn.Parameter(torch.ones(1 << 14, dtype=dtype))]

    expected = run(torchs(wide(torch.float32), **settings, foreach=False), 50)[0]
    got = run(ours(wide(torch.bfloat16), **settings, rounding="stochastic", seed=0), 50)[0]
    difference = got.detach().double() - expected.detach().double()
    # 16,384 weights, each a walk of 50 roundings by at most one unit, 2⁻⁷ above 1: a standard deviation of at
    # most half a unit each, and 5 of those of the mean
    assert abs(float(difference.mean())) < 5 * (0.5 * 2.0**-7 * 50**0.5) / 128
    assert float(difference.abs().max()) > 2.0**-9  # it is rounding


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_same_again_and_the_global_generator_is_left_alone(name, rounding):
    kind, _, settings = KINDS[name]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = run(kind(parameters(), **settings, rounding=rounding, seed=4), 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = run(kind(parameters(), **settings, rounding=rounding, seed=4), 3)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    other = run(kind(parameters(), **settings, rounding=rounding, seed=5), 3)
    same = all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert same == (rounding == "compensated")  # the seed is stochastic rounding's alone


def test_no_two_parameters_or_steps_share_their_noise():
    """From the same value by the same update, they come out different."""
    twins = [nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = StoredSGD(twins, lr=1e-3, momentum=0.0, rounding="stochastic", seed=0)
    moved = []
    for _ in range(2):
        for twin in twins:
            twin.data.fill_(1.0)
            twin.grad = torch.ones_like(twin)
        optimizer.step()
        moved += [twin.detach() != 1.0 for twin in twins]
    assert all(0 < int(some.sum()) < 1000 for some in moved)
    assert not any(torch.equal(moved[i], moved[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_first_update_is_torchs_rounded_once(name, rounding):
    """Both neighbours are allowed to stochastic rounding, the nearest alone to compensation."""
    ours, torchs, settings = KINDS[name]
    expected = run(torchs(parameters(torch.float32), **settings, foreach=False), 1)
    got = run(ours(parameters(), **settings, rounding=rounding, seed=0), 1)
    for mine, wanted in zip(got, expected, strict=True):
        exact = wanted.detach()
        if rounding == "compensated":
            assert torch.equal(mine, exact.to(torch.bfloat16))
        else:
            toward_0 = (exact.view(torch.int32) & (-1 << 16)).view(torch.float32)
            away = ((exact.view(torch.int32) & (-1 << 16)) + (1 << 16)).view(torch.float32)
            assert bool(((mine.float() == toward_0) | (mine.float() == away)).all())


def test_states_are_float32_and_go_through_a_state_dict():
    optimizer = StoredAdamW(parameters(), **ADAMW, rounding="stochastic", seed=7)
    run(optimizer, 3)
    for parameter, state in optimizer.state.items():
        assert parameter.dtype is torch.bfloat16
        assert {key: value.dtype for key, value in state.items()} == dict.fromkeys(
            ("exp_avg", "exp_avg_sq", "step"), torch.float32
        )
    saved = copy.deepcopy({p: dict(s) for p, s in optimizer.state.items()})
    resumed = [nn.Parameter(p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
    other = StoredAdamW(resumed, **ADAMW, rounding="stochastic", seed=7)
    for parameter, state in zip(resumed, saved.values(), strict=True):
        other.state[parameter] = copy.deepcopy(state)
    assert all(torch.equal(a, b) for a, b in zip(run(optimizer, 2, 3), run(other, 2, 3), strict=True))


def test_a_parameter_with_no_gradient_is_left_alone():
    held = parameters()
    optimizer = StoredAdamW(held, **ADAMW, rounding="stochastic", seed=0)
    held[0].grad = torch.ones_like(held[0])
    before = held[1].detach().clone()
    optimizer.step()
    assert torch.equal(held[1], before)
    assert held[1] not in optimizer.state


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_one_float32_copy_lives_at_a_time(name, rounding):
    kind, _, settings = KINDS[name]
    layers, size = 16, 4096
    model = nn.ParameterList([nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for _ in range(layers)])
    for parameter in model:
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.ones(size)
    optimizer = kind(model.parameters(), **settings, rounding=rounding, seed=0)
    optimizer.step()  # makes the states
    with Tracer(model, optimizer) as tracer:
        before = tracer.live_bytes()
        optimizer.step()
    above = tracer.trace().peak_bytes - before
    # one parameter's float32 copy, its noise and bits; a whole model's copy would be 16 of these
    assert 4 * size <= above <= 4 * 4 * size


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Lamb, {"states": "fp32"}),
        (StoredAdamW, {"states": "8-bit"}),
        (Lamb, {"rounding": "up"}),
        (Lamb, {"lr": -1.0}),
        (Lamb, {"lr": math.nan}),
        (StoredSGD, {"lr": math.inf}),
        (Lamb, {"betas": (1.5, 0.9)}),
        (StoredAdamW, {"betas": (0.9, -0.1)}),
        (Lamb, {"eps": -1.0}),
        (StoredSGD, {"weight_decay": -1.0}),
        (Lars, {"momentum": 2.0}),
        (Lars, {"trust_coefficient": -1.0}),
    ],
)
def test_a_setting_out_of_its_range_is_an_error(kind, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=re.escape(f"{name} = {value!r} is")):
        kind(parameters(), **{"lr": 1e-3, **wrong})


def test_a_groups_own_setting_is_held_to_the_range_too():
    optimizer = StoredSGD(parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=r"momentum = 1\.0 is out of range.*below 1"):
        optimizer.add_param_group({"params": parameters(), "momentum": 1.0})
    assert len(optimizer.param_groups) == 1


WAYS = [{}, {"states": "bf16"}, {"states": "8bit"}, {"rounding": "compensated"}]


@pytest.mark.parametrize("loaded", WAYS, ids=str)
@pytest.mark.parametrize("saved", WAYS, ids=str)
def test_a_state_stored_in_another_way_is_refused(saved, loaded):
    def matrix():
        return [nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)), nn.Parameter(torch.ones(3))]

    first, second = (StoredAdamW(matrix(), **ADAMW, **way) for way in (saved, loaded))
    run(first, 1)
    if saved == loaded:
        second.load_state_dict(first.state_dict())
        return
    before = second.param_groups[0]["params"][0].detach().clone()
    with pytest.raises(
        ValueError, match=r"the saved state of parameter 0 is .*exp_avg.*; this optimizer, with states = "
    ):
        second.load_state_dict(first.state_dict())
    assert not second.state
    assert torch.equal(second.param_groups[0]["params"][0], before)
