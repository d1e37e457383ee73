"""The share of an optimizer's work that one rank has, where ranks divide it: pieces of parameters, each 1-D.

Most updates are made element by element, and a piece is updated as it would be within its parameter. What goes by the
whole tensor (its shape, its norm, its place in a stream of random numbers) is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thrice.optim.blockwise import BLOCK


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements `start` to `stop` of a parameter, in its flattened order.

    Where its states may be kept by block, `start` is the first element of one.
    """

    name: str
    """Of the parameter, and so of the piece: a rank has at most one of each parameter."""
    shape: torch.Size
    """Of the parameter."""
    start: int
    stop: int

    def of(self, key: str, state: Tensor) -> Tensor:
        """The piece's part of the parameter's state `key`: the elements, the scales of its blocks, or the count."""
        if key == "step":
            return state
        flat, per = state.reshape(-1), 1 if state.numel() == self.shape.numel() else BLOCK
        return flat[self.start // per : -(-self.stop // per)].clone()


@dataclass(frozen=True, kw_only=True)
class Share:
    """What this rank's optimizer updates in place of parameters."""

    pieces: Mapping[Tensor, Piece]
    matrices: tuple[str, ...]
    """The parameters of at least 2 dimensions, of which any rank may have a piece."""
    sum_: Callable[[Tensor], Tensor]
    """Adds a tensor up over the ranks, in place; collective."""

    def named(self) -> dict[str, Tensor]:
        return {piece.name: tensor for tensor, piece in self.pieces.items()}
