"""From `meta` to a device: ties, flags and names stay; and each parameter has its own generator."""

from __future__ import annotations

import torch
from torch import nn

from thrice.model.initialise import initialise, materialise

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.inner[0].bias.requires_grad_(False)


def test_what_was_tied_stays_tied():
    with torch.device("meta"):
        model = Tied()
    before = {name: (p.shape, p.requires_grad) for name, p in model.named_parameters()}
    materialise(model, CPU)
    assert model.head.weight is model.embedding.weight
    assert {name: (p.shape, p.requires_grad) for name, p in model.named_parameters()} == before
    assert all(parameter.device == CPU for parameter in model.parameters())
    assert len({parameter.data_ptr() for parameter in model.parameters()}) == len(before)


def test_each_parameter_is_visited_once_with_its_own_generator():
    def values(model, seed):
        drawn = {}

        def rule(name, parameter, generator):
            assert name not in drawn
            drawn[name] = torch.randn(3, generator=generator)

        initialise(model, seed, rule)
        return drawn

    first = values(Tied(), 0)
    assert list(first) == [name for name, _ in Tied().named_parameters()]
    alone = nn.Module()
    alone.inner = nn.Sequential(nn.Linear(3, 3))  # fewer parameters, the same names
    fewer = values(alone, 0)
    assert all(torch.equal(first[name], value) for name, value in fewer.items())
    everything = list(first.values()) + list(values(Tied(), 1).values())
    assert not any(torch.equal(everything[i], everything[j]) for i in range(len(everything)) for j in range(i))
