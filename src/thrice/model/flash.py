"""Exact attention block by block: the scores are never whole, so memory grows with the sequence, not its square.

FlashAttention-2 (Dao, arXiv:2307.08691; arXiv:2205.14135) in plain tensor operations, for any device. A block of
queries meets one block of keys after the other and keeps a running maximum and a running sum; whatever was summed
under a smaller maximum is scaled down when a larger one appears. Backward computes each block of scores again. Blocks
are computed in float32 at least.

Forward and backward are one operator each, so that selective recomputation keeps the output and not the scores, a
compiler does not unroll the blocks, and a rehearsal needs no values. What backward needs of a row's softmax is kept
as its maximum and its sum, not as their one logarithm: that is known to 2e-3 where logits are 3e4, and an error of
it is an error of the whole row's probabilities, which in the gradient of queries and keys does not cancel.

Shapes: B samples, H query heads, K key/value heads, G = H / K query heads to each of them, T queries, S keys,
C channels of queries and keys, D channels of values; R queries and J keys in a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from thrice.errors import ConfigError, Problem
from thrice.model.attention import as_autocast, eager_attention

BLOCK = 256
"""Queries and keys in a block; of 64 to 1024 none was clearly faster on a CPU, and its scores are 256 KiB a head."""


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    block: int = BLOCK,
) -> Tensor:
    """Blockwise exact attention, with the signature and meaning of `F.scaled_dot_product_attention`.

    query (..., H, T, C), key (..., K, S, C), value (..., K, S, D) -> (..., H, T, D) in the queries' dtype. A row
    whose every key is masked is 0. Raises ConfigError for dropout and for a mask that needs a gradient: both have to
    be kept for backward as large as the score matrix; ValueError for what torch refuses too.
    """
    if block < 1:
        raise ValueError(f"block = {block}: a block has at least 1 query and 1 key; the default is {BLOCK}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p = {dropout_p} is no probability: it has to be within 0 and 1")
    if dropout_p > 0:
        why = (
            f"the model drops attention probabilities (dropout_p = {dropout_p:g}), and which ones would have to be kept"
        )
        raise _refusal(why, "its attention dropout")
    if attn_mask is not None and attn_mask.requires_grad:
        why = f"the model's attention mask {list(attn_mask.shape)} needs a gradient"
        raise _refusal(why, "what it learns of its mask")
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal and attn_mask exclude each other: the mask has to say what is causal")
    query, key, value, attn_mask = as_autocast(query, key, value, attn_mask)
    _check(query, key, value, attn_mask)
    if not (query.numel() and key.numel() and value.numel()):
        # nothing to cut into blocks, and no matrix to avoid
        return eager_attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    leading = _leading(query, key, value)
    heads = query.shape[-3] if query.ndim > 2 else 1
    q, k, v = (_four(tensor, leading, heads, enable_gqa) for tensor in (query, key, value))
    mask = None if attn_mask is None else _four_mask(attn_mask, leading)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out_BHTD: Tensor = torch.ops.thrice.flash_attention(q, k, v, mask, is_causal, scale, block)[0]
    if query.ndim == 4:
        return out_BHTD
    return out_BHTD.reshape(*leading, *query.shape[-3:-1], value.shape[-1])


def _leading(*tensors: Tensor) -> torch.Size:
    """The dimensions before heads, broadcast."""
    leading: torch.Size = torch.broadcast_shapes(*(t.shape[:-3] for t in tensors))  # type: ignore[no-untyped-call]
    return leading


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Dtypes and the mask's shape: what differs there would be computed as something else, or fail far inside."""
    dtypes = [tensor.dtype for tensor in (query, key, value)]
    if len(set(dtypes)) != 1 or not query.is_floating_point():
        shown = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"query, key and value are {shown}: they have to be of one floating dtype; convert them with .to"
        )
    if mask is None:
        return
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise ValueError(
            f"attn_mask is {str(mask.dtype).removeprefix('torch.')}: it has to be bool (True is seen), or what is "
            "added to the scores, in float32 or the queries' dtype"
        )
    scores = torch.Size((*_leading(query, key, value), *query.shape[-3:-1], key.shape[-2]))
    # an aligned size is 1 or the scores' own
    fits = 2 <= mask.ndim <= len(scores) and all(
        size in (1, own) for size, own in zip(mask.shape[::-1], scores[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask {list(mask.shape)} does not fit scores {list(scores)} (..., heads, queries, keys): it needs "
            "their sizes, or 1, in at least the last two"
        )


def _refusal(why: str, what: str) -> ConfigError:
    why += ", as large as the whole score matrix"
    return ConfigError(
        [Problem(key="attention", value="flash", why=why, fix=f'switch {what} off in the model, or attention = "sdpa"')]
    )


def _four(tensor: Tensor, leading: torch.Size, heads: int, grouped: bool) -> Tensor:
    """(B, heads, length, channels); key/value heads stay as few as they are."""
    if tensor.ndim == 2:
        tensor = tensor[None]
    own = tensor.shape[-3] if grouped else heads
    tensor = tensor.expand(*leading, own, *tensor.shape[-2:])
    return tensor.flatten(0, -4) if tensor.ndim > 4 else tensor if tensor.ndim == 4 else tensor[None]


def _four_mask(mask: Tensor, leading: torch.Size) -> Tensor:
    """As it is, up to dimensions of size 1: it broadcasts against (B, H, T, S)."""
    while mask.ndim < 4:
        mask = mask[None]
    if mask.ndim == 4 and len(leading) <= 1:
        return mask
    return mask.expand(*leading, *mask.shape[-3:]).flatten(0, -4)


def visited(queries: int, keys: int, causal: bool, block: int) -> Iterator[tuple[slice, list[slice]]]:
    """Each block of queries with the blocks of keys that it sees: under a causal mask none beyond the diagonal."""
    for start in range(0, queries, block):
        rows = slice(start, min(start + block, queries))
        seen = min(keys, rows.stop) if causal else keys
        yield rows, [slice(first, min(first + block, keys)) for first in range(0, seen, block)]


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(output (B, H, T, D) in the queries' dtype, maximum and sum of each row of scores, (B, H, T, 1), wide).

    The sum is that of exp(score - maximum); both are 0 in a row whose every key is masked.
    """
    out, maxima, totals = _empty_outputs(query, value)
    with torch.autocast(query.device.type, enabled=False):
        for rows, columns in visited(query.shape[2], key.shape[2], causal, block):
            q_BKRC = _rows(_grouped(query, key), rows) * scale
            maximum = q_BKRC.new_full((*q_BKRC.shape[:-1], 1), -math.inf)
            total, weighted = torch.zeros_like(maximum), q_BKRC.new_zeros(*q_BKRC.shape[:-1], value.shape[-1])
            for keys in columns:
                scores = _scores(q_BKRC, key, mask, causal, rows, keys)
                larger = torch.maximum(maximum, scores.amax(-1, keepdim=True))
                # where all keys so far are masked the maximum is -inf, and -inf - -inf would be NaN
                shift = larger.masked_fill(larger == -math.inf, 0.0)
                rescale = (maximum - shift).exp_()
                probabilities = scores.sub_(shift).exp_()
                total = total * rescale + probabilities.sum(-1, keepdim=True)
                weighted = weighted * rescale + probabilities @ _wide(value[:, :, keys])
                maximum = larger
            for whole, part in ((out, weighted / total.masked_fill(total == 0, 1.0)), (maxima, shift), (totals, total)):
                by_head = _grouped(whole, key)[:, :, :, rows]
                by_head.copy_(part.view(by_head.shape))
    return out, maxima, totals


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    maxima: Tensor,
    totals: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, given that of the output; in their dtypes."""
    d_query = _like(query)
    d_key, d_value = (torch.zeros(tensor.shape, dtype=totals.dtype, device=tensor.device) for tensor in (key, value))
    with torch.autocast(query.device.type, enabled=False):
        for rows, columns in visited(query.shape[2], key.shape[2], causal, block):
            q_BKRC = _rows(_grouped(query, key), rows) * scale
            maximum, total = (_rows(_grouped(whole, key), rows) for whole in (maxima, totals))
            # probabilities are not divided by their sum below; what they are multiplied by is, here
            d_out_BKRD = _rows(_grouped(gradient, key), rows) / total.masked_fill(total == 0, 1.0)
            # what the softmax takes off each row: Σ probabilities × their gradients = output · its gradient
            taken = (d_out_BKRD * _rows(_grouped(out, key), rows)).sum(-1, keepdim=True)
            d_q_BKRC = torch.zeros_like(q_BKRC)
            for keys in columns:
                k_BKJC, v_BKJD = _wide(key[:, :, keys]), _wide(value[:, :, keys])
                scores = _scores(q_BKRC, key, mask, causal, rows, keys)
                probabilities = scores.sub_(maximum).exp_()
                d_value[:, :, keys] += probabilities.mT @ d_out_BKRD
                d_scores = (d_out_BKRD @ v_BKJD.mT).sub_(taken).mul_(probabilities)
                d_q_BKRC += d_scores @ k_BKJC
                d_key[:, :, keys] += d_scores.mT @ q_BKRC
            by_head = _grouped(d_query, key)[:, :, :, rows]
            by_head.copy_(d_q_BKRC.mul_(scale).view(by_head.shape))
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype)


def _scores(q_BKRC: Tensor, key: Tensor, mask: Tensor | None, causal: bool, rows: slice, keys: slice) -> Tensor:
    """One block of masked scores, (B, K, G × R, J); the heads of a group share their keys, so they are rows here."""
    scores = q_BKRC @ _wide(key[:, :, keys]).mT
    by_head = scores.view(*scores.shape[:2], -1, rows.stop - rows.start, scores.shape[-1])
    if causal and keys.stop > rows.start + 1:
        positions = [torch.arange(part.start, part.stop, device=key.device) for part in (rows, keys)]
        by_head.masked_fill_(positions[1] > positions[0][:, None], -math.inf)
    if mask is not None:
        part = mask[..., rows if mask.shape[-2] > 1 else slice(None), keys if mask.shape[-1] > 1 else slice(None)]
        part = _grouped(part, key) if mask.shape[1] > 1 else part[:, :, None]
        if mask.dtype is torch.bool:
            by_head.masked_fill_(~part, -math.inf)
        else:
            by_head += part
    return scores


def _grouped(tensor_BHTC: Tensor, key: Tensor) -> Tensor:
    """(B, K, G, T, C)."""
    grouped: Tensor = tensor_BHTC.unflatten(1, (key.shape[1], -1))  # type: ignore[no-untyped-call]
    return grouped


def _rows(tensor_BKGTC: Tensor, rows: slice) -> Tensor:
    return _wide(tensor_BKGTC[:, :, :, rows]).flatten(2, 3)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _empty_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output lies as (B, T, H, D), as torch's kernels lay it: joining the heads again is free."""
    samples, heads, queries, _ = query.shape
    out = query.new_empty(samples, queries, heads, value.shape[-1]).transpose(1, 2)
    wide = torch.promote_types(query.dtype, torch.float32)
    maxima, totals = (query.new_empty(samples, heads, queries, 1, dtype=wide) for _ in range(2))
    return out, maxima, totals


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


_forward = custom_op("thrice::flash_attention", forward, mutates_args=())
OPERATOR = torch.ops.thrice.flash_attention.default
"""What a dispatch mode sees of the forward."""
_backward = custom_op("thrice::flash_attention_backward", backward, mutates_args=())
_forward.register_fake(lambda query, key, value, *_: _empty_outputs(query, value))
_backward.register_fake(lambda gradient, query, key, value, *_: (_like(query), _like(key), _like(value)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, mask, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, mask)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, gradient: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.thrice.flash_attention_backward(gradient, *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None, None


def _no_second_derivative(ctx: Any, *gradients: object) -> Any:
    raise NotImplementedError(
        "flash attention has no second derivative (create_graph=True, then backward through the gradient); use "
        'attention = "eager", or thrice.model.attention.eager_attention'
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_no_second_derivative)


def _scores_computed(query: Tensor, key: Tensor, causal: bool, block: int) -> int:
    area: int = sum(
        (rows.stop - rows.start) * (keys.stop - keys.start)
        for rows, columns in visited(query.shape[2], key.shape[2], causal, block)
        for keys in columns
    )
    return query.shape[0] * query.shape[1] * area


@register_flop_formula(torch.ops.thrice.flash_attention, get_raw=True)
def _forward_flops(
    query: Tensor, key: Tensor, value: Tensor, mask: object, causal: bool, scale: float, block: int, **_: object
) -> int:
    """Two products, in the blocks that run: scores, and probabilities × values."""
    return 2 * _scores_computed(query, key, causal, block) * (query.shape[-1] + value.shape[-1])


@register_flop_formula(torch.ops.thrice.flash_attention_backward, get_raw=True)
def _backward_flops(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    maxima: Tensor,
    totals: Tensor,
    mask: object,
    causal: bool,
    scale: float,
    block: int,
    **_: object,
) -> int:
    """Five products: scores again, and the gradients of values, probabilities, queries and keys."""
    return 2 * _scores_computed(query, key, causal, block) * (3 * query.shape[-1] + 2 * value.shape[-1])
