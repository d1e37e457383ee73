"""8-bit blockwise storage of an optimizer's state (Dettmers et al., arXiv:2110.02861).

A tensor is cut, in its flattened order, into blocks of 256. A block keeps its largest absolute value as a
float32 scale, and each element as one of 256 values between -1 and 1 (0 and 1 where nothing is negative): the
paper's dynamic code, ten to a hundred times finer near 0 than a uniform one. The last block may be short.

The nearest code is found through a table indexed by an element's upper 16 bits, which no two borders between
codes share, and one comparison with the border that may lie within: several times faster than a binary search.
The tables are constants of numpy: a tensor kept between calls would be fake after a rehearsal.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 256
_CHUNK = BLOCK << 12
"""Elements handled at a time: what is temporary stays a few MiB, whatever the tensor."""


def dynamic_code(*, signed: bool) -> NDArray[np.float32]:
    """The 256 values in ascending order, float32 (arXiv:2110.02861 §1.3 and appendix F).

    Each decade from 10⁻⁷ up to 1 is cut into equal parts, twice as many as the decade below, and each part has
    its middle as a value; 0 and 1 are values too. A signed code has -1's decades, but not -1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (decade if signed else decade + 1) + 1) * 10.0 ** (decade - 6)
        middles = (edges[1:] + edges[:-1]) / 2
        values += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(values)).astype(np.float32)


def _borders(*, signed: bool) -> NDArray[np.float32]:
    """What lies above border i is nearer to value i + 1 than to value i."""
    code = dynamic_code(signed=signed)
    borders = np.append((code[1:] + code[:-1]) / 2, np.inf).astype(np.float32)
    if not signed:
        # a second moment that became 0 would leave m / eps for an update; the smallest value is too large, hence safe
        borders[0] = 0.0
    return borders


def _lowest(*, signed: bool) -> NDArray[np.uint8]:
    """Upper 16 bits of a float32 -> the code of the least float32 that has them."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    least = np.where(upper >> 31, upper | 0xFFFF, upper).astype(np.uint32).view(np.float32)
    return np.searchsorted(_borders(signed=signed)[:-1], np.nan_to_num(least)).astype(np.uint8)


_CODES = {signed: dynamic_code(signed=signed) for signed in (False, True)}
_BORDERS = {signed: _borders(signed=signed) for signed in (False, True)}
_LOWEST = {signed: _lowest(signed=signed) for signed in (False, True)}


def quantise(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a float tensor: uint8 of its shape, and float32 of one element a block.

    Where not `signed`, nothing is negative, and no element above 0 is stored as 0. A block with a NaN is NaN.
    """
    lowest = torch.tensor(_LOWEST[signed], device=x.device)
    borders = torch.tensor(_BORDERS[signed], device=x.device)
    flat = x.reshape(-1)
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(-(-flat.numel() // BLOCK), device=x.device)
    for part, code, scale in _chunks(flat, codes, scales):
        short = -part.numel() % BLOCK
        blocks = (F.pad(part, (0, short)) if short else part).float().view(-1, BLOCK)
        # a block of zeros has zeros for codes, and something to divide by
        torch.clamp_min(blocks.abs().amax(1), torch.finfo(torch.float32).tiny, out=scale)
        scaled = (blocks / scale.unsqueeze(1)).view(-1)[: part.numel()]
        upper = (scaled.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
        low = lowest.index_select(0, upper)
        code.copy_(low).add_(scaled > borders.index_select(0, low.int()))
    return codes.view(x.shape), scales


def dequantise(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The float32 tensor, contiguous, of the shape of `codes`, that `quantise` kept."""
    values = torch.tensor(_CODES[signed], device=codes.device)
    out = torch.empty(codes.shape, device=codes.device)
    for part, code, scale in _chunks(out.view(-1), codes.view(-1), scales):
        torch.index_select(values, 0, code.int(), out=part)
        whole = part.numel() // BLOCK
        part[: whole * BLOCK].view(-1, BLOCK).mul_(scale[:whole].unsqueeze(1))
        part[whole * BLOCK :].mul_(scale[whole:])
    return out


def _chunks(one: Tensor, other: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Two flat tensors and the scales of their blocks, in pieces that belong together."""
    per_chunk = (_CHUNK, _CHUNK, _CHUNK // BLOCK)
    pieces = (torch.split(tensor, size) for tensor, size in zip((one, other, scales), per_chunk, strict=True))
    return zip(*pieces, strict=True)
