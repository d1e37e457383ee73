"""What replicas of a model need before they train."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from thrice.runtime.dist import World


def share_weights(model: nn.Module, world: World) -> None:
    """Rank 0's weights and buffers to all: built from one seed they are the same, and a caller's model may not be."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, 0)
