"""Several optimizers that look like one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from thrice.optim.composite import Composite


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model[1].parameters(), lr=0.2, fused=True)
    return model, first, second


def give_gradients(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_a_step_is_that_of_each_part():
    model, first, second = made()
    twin, *parts = made()
    both = Composite([first, second])
    for seed in range(3):
        give_gradients(model, seed)
        give_gradients(twin, seed)
        both.step()
        for part in parts:
            part.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_groups_and_states_are_the_parts_own():
    model, first, second = made()
    give_gradients(model)
    first.step()  # states from before are taken over
    both = Composite([first, second])
    assert [id(group) for group in both.param_groups] == [id(g) for part in (first, second) for g in part.param_groups]
    assert "betas" not in first.param_groups[0]
    assert "momentum" not in second.param_groups[0]
    assert first.state is second.state is both.state
    assert set(both.state) == set(model[0].parameters())
    both.step()
    assert set(both.state) == set(model.parameters())
    both.param_groups[1]["lr"] = 0.0
    before = [parameter.detach().clone() for parameter in model[1].parameters()]
    both.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model[1].parameters(), strict=True))
    both.state.clear()
    assert not second.state
    assert (both.defaults["momentum"], both.defaults["fused"]) == (0.9, True)


def test_zero_grad_and_closure():
    model, first, second = made()
    both = Composite([first, second])
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss.item()

    before = model(torch.ones(1, 4)).sum().item()
    assert both.step(closure) == pytest.approx(before)
    assert calls == [True]
    both.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_hooks_run_around_each_part_until_removed():
    model, first, second = made()
    both = Composite([first, second])
    seen = []
    handles = [
        both.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(("before", optimizer))),
        both.register_step_post_hook(lambda optimizer, args, kwargs: seen.append(("after", optimizer))),
    ]
    give_gradients(model)
    both.step()
    assert seen == [("before", first), ("after", first), ("before", second), ("after", second)]
    seen.clear()
    second.step()  # as an optimizer in backward steps its parts
    assert seen == [("before", second), ("after", second)]
    for handle in handles:
        handle.remove()
    both.step()
    assert len(seen) == 2


def test_a_state_dict_reaches_the_parts():
    model, first, second = made()
    both = Composite([first, second])
    for seed in range(2):
        give_gradients(model, seed)
        both.step()
    twin, *parts = made()
    other = Composite(parts)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(both.state_dict()))
    for of, optimizer in ((model, both), (twin, other)):
        give_gradients(of, 9)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert parts[0].param_groups[0] is other.param_groups[0]
