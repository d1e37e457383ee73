"""The loss of a window is Σ per-token loss / Σ tokens, so each micro-batch hands on a sum.

Shapes: B samples, T tokens, N = B × T, D hidden, V vocabulary; R tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from thrice.data.batches import IGNORE
from thrice.errors import ConfigError, Problem

CHUNK_TOKENS = 256
"""Tokens whose logits exist at once; of 64 to 512 the fastest on a CPU at 32,000 classes."""


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Σ of -log p(target) over the targets that are not -100, in nats; a float32 scalar.

    The softmax is in float32 whatever the logits' dtype. Targets that are all ignored give 0, never NaN. Raises
    ConfigError for what is no tensor: a model of the caller's may return a tuple, or an object that holds logits.
    """
    if not isinstance(logits_BTV, Tensor):
        raise ConfigError(
            [
                Problem(
                    key="model",
                    why=f"it returns a {type(logits_BTV).__name__}, and the loss takes its logits, one tensor",
                    fix="wrap it in a module whose forward returns the logits alone",
                )
            ]
        )
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum")


def chunked_cross_entropy_sum(
    hidden_BTD: Tensor,
    targets_BT: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None = None,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """`cross_entropy_sum` of the logits `hidden @ weight.T + bias`, of which `chunk_tokens` tokens exist at a time.

    The product is in autocast's dtype where it is on. What backward needs is computed along with the loss, chunk by
    chunk, and kept in float32: gradients of hidden and weight in place of logits, and no product is computed twice
    (as in Liger Kernel, arXiv:2410.10989). So the gradient can be taken once, and has none of its own.
    """
    kind = hidden_BTD.device.type
    low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_BTD.dtype
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden_BTD, weight_VD, bias_V)]
    loss: Tensor = _Chunked.apply(
        hidden_BTD.flatten(0, 1), weight_VD, bias_V, targets_BT.flatten(), chunk_tokens, low, wanted
    )  # type: ignore[no-untyped-call]
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        chunk_tokens: int,
        dtype: torch.dtype,
        wanted: list[bool],
    ) -> Tensor:
        # a probability of 2e-5 has few bits in float16: it is lifted by a power of two until backward
        ctx.lift = 2.0**15 if dtype is torch.float16 else 1.0
        gradients = [
            torch.zeros_like(tensor, dtype=torch.float32) if needed and tensor is not None else None
            for tensor, needed in zip((hidden_ND, weight_VD, bias_V), wanted, strict=True)
        ]
        d_hidden_ND, d_weight_VD, d_bias_V = gradients
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight, bias = weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)
            for start in range(0, len(targets_N), chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                hidden_RD = hidden_ND[rows].to(dtype)
                logits_RV = F.linear(hidden_RD, weight, bias).float()
                chunk_loss, slope_RV = _loss_and_slope(logits_RV, targets_N[rows], ctx.lift if any(wanted) else None)
                loss += chunk_loss
                if slope_RV is None:
                    continue
                if d_bias_V is not None:
                    d_bias_V += slope_RV.sum(0)
                slope_RV = slope_RV.to(dtype)
                if d_hidden_ND is not None:
                    _add_product(d_hidden_ND[rows], slope_RV, weight)
                if d_weight_VD is not None:
                    _add_product(d_weight_VD, slope_RV.T, hidden_RD)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # autograd casts each to what its input takes: too large for float16 becomes inf, as it must
        factor = gradient / ctx.lift
        scaled = [None if kept is None else kept.mul_(factor) for kept in ctx.saved_tensors]
        return *scaled, None, None, None, None


def _loss_and_slope(logits_RV: Tensor, targets_R: Tensor, lift: float | None) -> tuple[Tensor, Tensor | None]:
    """(loss of the chunk, its gradient with respect to the logits × lift); the logits are overwritten by the latter.

    The gradient is softmax - one_hot in the rows that count and 0 in the others; None where `lift` is.
    """
    counted_R = targets_R != IGNORE
    targets_R1 = torch.where(counted_R, targets_R, 0)[:, None]
    logits_RV -= logits_RV.amax(-1, keepdim=True)
    of_target_R1 = logits_RV.gather(-1, targets_R1)
    total_R1 = logits_RV.exp_().sum(-1, keepdim=True)
    loss = torch.where(counted_R, (total_R1.log() - of_target_R1)[:, 0], 0.0).sum()
    if lift is None:
        return loss, None
    slope_RV = logits_RV.mul_(lift / total_R1)
    slope_RV.scatter_add_(-1, targets_R1, torch.full_like(total_R1, -lift))
    return loss, slope_RV.masked_fill_(~counted_R[:, None], 0.0)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in float32 where the device can."""
    if a.dtype is total.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda":
        total += torch.mm(a, b, out_dtype=total.dtype)
    elif a.dtype is torch.float16:
        # lifted as they are, products overflow float16; and CPUs emulate it, so float32 is the faster too
        total += a.float() @ b.float()
    else:
        total += a @ b
