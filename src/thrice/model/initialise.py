"""Initial weights, the same for every layout: each parameter has a generator of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from thrice.spec.seed import key


@torch.no_grad()
def initialise(model: nn.Module, seed: int, rule: Callable[[str, Tensor, Generator], None]) -> None:
    """Calls `rule(name, parameter, generator)` for each parameter, its generator keyed by (seed, name).

    A tied parameter is visited once, under its first name. Values are drawn on the CPU generator's stream
    where the parameter lives on the CPU, and on the device's own elsewhere: those two differ.
    """
    for name, parameter in model.named_parameters():
        rule(name, parameter, Generator(device=parameter.device).manual_seed(key(seed, name)))


def materialise(model: nn.Module, device: torch.device) -> None:
    """Gives a model built on `meta` uninitialised parameters on `device`; what was tied stays tied.

    `Module.to_empty` would untie, and cannot be used on fake tensors.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                empty = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, made[parameter])
