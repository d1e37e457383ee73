"""Initial weights, the same for every layout: each parameter has a generator of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn


def key(*parts: object) -> int:
    """A generator's seed from anything that has a text form, 63 bits of its SHA-256."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@torch.no_grad()
def initialise(model: nn.Module, seed: int, rule: Callable[[str, Tensor, Generator], None]) -> None:
    """Calls `rule(name, parameter, generator)` for each parameter, its generator keyed by (seed, name).

    A tied parameter is visited once, under its first name. Values are drawn on the CPU generator's stream
    where the parameter lives on the CPU, and on the device's own elsewhere: those two differ.
    """
    for name, parameter in model.named_parameters():
        rule(name, parameter, Generator(device=parameter.device).manual_seed(key(seed, name)))
