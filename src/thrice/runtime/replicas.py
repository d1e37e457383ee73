"""What the ways of making replicas share: the same weights at the start, and buckets of gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from thrice.runtime.dist import World

MIB = 1 << 20
BUCKET_BYTES = 25 * MIB
"""Of gradients that travel together where nothing is said: torch's own choice for DDP."""

Named = tuple[str, nn.Parameter]


def share_weights(model: nn.Module, world: World) -> None:
    """Rank 0's weights and buffers to all: built from one seed they are the same, and a caller's model may not be."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, 0)


def filled(named: Iterable[Named], most_bytes: int) -> list[list[Named]]:
    """In order, those of a kind in lists whose gradients take at most so many bytes, or of one that takes more."""
    lists: list[list[Named]] = []
    last: dict[object, tuple[list[Named], int]] = {}
    for name, parameter in named:
        wide = parameter.grad_dtype or parameter.dtype
        kind, size = (parameter.device, parameter.dtype, wide), parameter.numel() * wide.itemsize
        chosen, held = last.get(kind, ([], 0))
        if not chosen or held + size > most_bytes:
            chosen, held = [], 0
            lists.append(chosen)
        chosen.append((name, parameter))
        last[kind] = chosen, held + size
    return lists
