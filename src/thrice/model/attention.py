"""Causal attention with grouped-query heads, attention that materialises its matrix, and rotary positions.

Shapes: B samples, T tokens, H query heads, K key/value heads, C channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def rotary_tables(positions: int, channels: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, each (positions, channels / 2), float32.

    RoFormer (arXiv:2104.09864) §3.2.2; channel i is paired with channel i + channels/2, as in Llama
    checkpoints in the Hugging Face layout.
    """
    frequency = theta ** (-torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x_BTHC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Turns each pair of channels by its position's angle, in float32 at least; the input's dtype comes back."""
    cos, sin = cos_TC[:, None, :], sin_TC[:, None, :]
    first, second = x_BTHC.to(torch.promote_types(x_BTHC.dtype, cos_TC.dtype)).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BTHC.dtype)


Kernel = Callable[..., Tensor]
"""An attention with the signature of `F.scaled_dot_product_attention`."""


def causal_attention(kernel: Kernel, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
    """Exact causal attention; (B, T, H, C) in the queries' dtype."""
    grouped = q_BTHC.shape[2] != k_BTKC.shape[2]
    out_BHTC = kernel(
        q_BTHC.transpose(1, 2),
        k_BTKC.transpose(1, 2),
        v_BTKC.transpose(1, 2),
        is_causal=True,
        enable_gqa=grouped,
    )
    return out_BHTC.transpose(1, 2)


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as it is written down, with the signature and meaning of `F.scaled_dot_product_attention`.

    query (..., H, T, C), key (..., K, S, C), value (..., K, S, D) -> (..., H, T, D) in the queries' dtype. The
    (T, S) matrix of scores is there as a whole, its softmax in float32 at least. A row whose every key is masked
    is 0.
    """
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal and attn_mask exclude each other: the mask has to say what is causal")
    query, key, value, attn_mask = as_autocast(query, key, value, attn_mask)
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], dim=-3) for t in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # scaled before the product: in float16 a score may be too large where the scaled one is not
    scores = (query * scale) @ key.mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    empty = None
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    elif attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype is torch.bool else scores + attn_mask
        empty = (scores == -math.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(empty, 0.0)  # a softmax of nothing is NaN, and so is its gradient
    weights = scores.softmax(-1)
    if empty is not None:
        weights = weights.masked_fill(empty, 0.0)
    return torch.dropout(weights.to(query.dtype), dropout_p, True) @ value


def as_autocast(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What autocast, where it is on, makes of the arguments of `F.scaled_dot_product_attention`."""
    kind = query.device.type
    if not torch.is_autocast_enabled(kind):
        return query, key, value, mask
    low = torch.get_autocast_dtype(kind)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(low) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor

    return cast(query), cast(key), cast(value), None if mask is None else cast(mask)
