"""Causal attention with grouped-query heads, and rotary positions.

Shapes: B samples, T tokens, H query heads, K key/value heads, C channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


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


def causal_attention(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
    """Exact causal attention through torch's fused kernels; (B, T, H, C) in the queries' dtype."""
    grouped = q_BTHC.shape[2] != k_BTKC.shape[2]
    out_BHTC = F.scaled_dot_product_attention(
        q_BTHC.transpose(1, 2),
        k_BTKC.transpose(1, 2),
        v_BTKC.transpose(1, 2),
        is_causal=True,
        enable_gqa=grouped,
    )
    return out_BHTC.transpose(1, 2)
