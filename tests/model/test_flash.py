"""Blockwise attention and attention with its matrix, against torch's kernels and a float64 reference."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from thrice.errors import ConfigError
from thrice.model import flash
from thrice.model.attention import eager_attention
from thrice.model.flash import flash_attention

# 12 divides neither 37 nor 53
KERNELS = {"flash": partial(flash_attention, block=12), "eager": eager_attention}


@pytest.fixture(params=KERNELS)
def kernel(request):
    return KERNELS[request.param]


def inputs(*, heads=4, kv_heads=4, queries=37, keys=37, dtype=torch.float32, spread=1.0, channels=8):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, heads, queries, channels), (2, kv_heads, keys, channels), (2, kv_heads, keys, 6)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q * spread, k, v, torch.randn(2, heads, queries, 6, generator=generator).to(dtype)


def run(attention, q, k, v, gradient, **options):
    """(output, gradients of q, k and v)."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    out = attention(*leaves, enable_gqa=q.shape[:-2] != k.shape[:-2], **options)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient.to(out.dtype))


def written_down(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """As torch's documentation writes it, its probabilities of a row with nothing in it being 0."""
    if is_causal:
        attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    bias = torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype)
    if attn_mask is not None:
        bias = bias.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype is torch.bool else bias + attn_mask
    if enable_gqa:
        k, v = (tensor.repeat_interleave(q.shape[-3] // tensor.shape[-3], -3) for tensor in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


def distances(got, expected):
    """Relative ones; where the expected is 0 (the gradient of a softmax over one key), absolute."""
    pairs = [(g.double(), e.double()) for g, e in zip(got, expected, strict=True)]
    return [float((g - e).norm() / (e.norm() if e.norm() > 1e-6 else 1.0)) for g, e in pairs]


def assert_agrees(kernel, q, k, v, gradient, tolerance, **options):
    """To rounding: with the reference in float64, and with torch's kernel."""
    wide = [tensor.double() for tensor in (q, k, v, gradient)]
    mask = options.get("attn_mask")
    widened = options if mask is None or mask.dtype is torch.bool else {**options, "attn_mask": mask.double()}
    got = run(kernel, q, k, v, gradient, **options)
    assert all(tensor.dtype is q.dtype for tensor in got)
    assert max(distances(got, run(written_down, *wide, **widened))) < tolerance
    assert max(distances(got, run(F.scaled_dot_product_attention, q, k, v, gradient, **options))) < 2 * tolerance


PADDING = torch.arange(53) < torch.tensor([[40], [53]])
MASKS = {
    "none": None,
    "padding": PADDING[:, None, None, :],
    "bool": torch.rand(37, 53, generator=torch.Generator().manual_seed(1)) > 0.4,
    "per head": torch.rand(2, 4, 37, 53, generator=torch.Generator().manual_seed(1)) > 0.4,
    "bias": torch.randn(1, 4, 37, 53, generator=torch.Generator().manual_seed(1)),
    "-inf": torch.zeros(2, 1, 37, 53).masked_fill(~PADDING[:, None, None, :], -math.inf),
    "least float": torch.zeros(2, 1, 37, 53).masked_fill(~PADDING[:, None, None, :], torch.finfo(torch.float32).min),
}


# float32 sums of 53 terms in another order: a few spacings of 1.2e-7
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_grouped_heads(kernel, mask, kv_heads):
    assert_agrees(kernel, *inputs(kv_heads=kv_heads, keys=53), 2e-6, attn_mask=MASKS[mask])


@pytest.mark.parametrize(("queries", "keys"), [(37, 37), (37, 53), (53, 37), (1, 37), (12, 24)])
def test_causal(kernel, queries, keys):
    assert_agrees(kernel, *inputs(kv_heads=2, queries=queries, keys=keys), 2e-6, is_causal=True)


def test_scale_is_taken(kernel):
    assert_agrees(kernel, *inputs(), 2e-6, scale=0.05)


def test_logits_of_ten_thousand(kernel):
    """A maximum that is not subtracted overflows; maxima that are not reconciled give another answer."""
    q, k, _, _ = inputs(spread=1e4)
    # as many channels in values as in keys: torch's fused kernel wants it
    v, gradient = torch.randn(2, 2, 4, 37, 8, generator=torch.Generator().manual_seed(1))
    assert (q @ k.mT / 8**0.5).abs().max() > 1e4
    expected = run(written_down, *(tensor.double() for tensor in (q, k, v, gradient)), is_causal=True)
    got, torchs = (run(a, q, k, v, gradient, is_causal=True) for a in (kernel, F.scaled_dot_product_attention))
    assert all(bool(tensor.isfinite().all()) for tensor in got)
    ours, theirs = distances(got, expected), distances(torchs, expected)
    # float32 knows a logit of 3e4 to 2e-3; the probabilities are 0 or 1 nearly everywhere, and flat there: what is
    # left of the gradients of queries and keys is a difference of numbers much larger than itself
    assert max(ours[0], ours[3]) < 1e-4
    assert max(ours[1:3]) < 0.1
    assert max(ours[1:3]) <= max(theirs[1:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype):
    """Flash rounds at its ends alone, as torch's kernel does; backward reads its output, rounded."""
    q, k, v, gradient = inputs(kv_heads=2, dtype=dtype)
    wide = [tensor.double() for tensor in (q, k, v, gradient)]
    expected = run(written_down, *wide, is_causal=True)
    ours, torchs, eager = (
        distances(run(attention, q, k, v, gradient, is_causal=True), expected)
        for attention in (KERNELS["flash"], F.scaled_dot_product_attention, eager_attention)
    )
    assert all(our <= 1.4 * their for our, their in zip(ours, torchs, strict=True))
    assert max(ours) < torch.finfo(dtype).eps
    assert max(eager) < 3 * torch.finfo(dtype).eps  # it rounds the scores and the weights too


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_is_followed_as_by_torch(kernel, low):
    q, k, v, gradient = inputs()
    for mask in (None, torch.zeros(37, 37).masked_fill(torch.ones(37, 37).triu(1) > 0, torch.finfo(torch.float32).min)):
        with torch.autocast("cpu", low):
            ours, torchs = (
                run(attention, q, k, v, gradient, attn_mask=mask)
                for attention in (kernel, F.scaled_dot_product_attention)
            )
            plain = run(kernel, *(tensor.to(low) for tensor in (q, k, v, gradient)), attn_mask=mask)
        assert ours[0].dtype is torchs[0].dtype is low
        assert torch.equal(ours[0], plain[0])
        assert max(distances(ours, torchs)) < 4 * torch.finfo(low).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["bool", "-inf", "least"])
def test_a_row_with_nothing_to_see_is_finite(kernel, dtype, how):
    q, k, v, gradient = inputs(dtype=dtype)
    seen = torch.ones(37, 37, dtype=torch.bool).tril()
    seen[5] = False
    least = -math.inf if how == "-inf" else torch.finfo(dtype).min  # -1e9 would be no float16
    mask = seen if how == "bool" else torch.zeros(37, 37, dtype=dtype).masked_fill(~seen, least)
    got = run(kernel, q, k, v, gradient, attn_mask=mask)
    assert all(bool(tensor.isfinite().all()) for tensor in got)
    if how != "least":
        assert bool((got[0][:, :, 5] == 0).all())
        assert bool((got[1][:, :, 5] == 0).all())
    others = torch.arange(37) != 5
    torchs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert distances([got[0][:, :, others]], [torchs[:, :, others]])[0] < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("shape", [(37, 8), (3, 37, 8), (2, 3, 4, 37, 8)])
def test_any_number_of_leading_dimensions(kernel, shape):
    q, k, v, gradient = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(*shape[:-1], 37, generator=torch.Generator().manual_seed(1)) > 0.4
    for options in ({"is_causal": True}, {"attn_mask": mask}):
        got, expected = (run(a, q, k, v, gradient, **options) for a in (kernel, F.scaled_dot_product_attention))
        assert [t.shape for t in got] == [t.shape for t in expected]
        assert max(distances(got, expected)) < 2e-6


def test_16k_tokens():
    q, k, v = torch.randn(3, 1, 1, 16_384, 16, generator=torch.Generator().manual_seed(0))
    got = flash_attention(q, k, v, is_causal=True, block=1024)
    assert distances([got], [F.scaled_dot_product_attention(q, k, v, is_causal=True)])[0] < 2e-6


def test_blocks_change_nothing_but_rounding():
    q, k, v, gradient = inputs()
    whole = run(partial(flash_attention, block=64), q, k, v, gradient, is_causal=True)
    for block in (1, 5, 37):
        got = run(partial(flash_attention, block=block), q, k, v, gradient, is_causal=True)
        assert max(distances(got, whole)) < 2e-6


def test_what_would_have_to_be_kept_is_refused():
    q, k, v, _ = inputs()
    with pytest.raises(ConfigError, match=r"dropout_p = 0.1.*\n.*attention dropout off.*sdpa"):
        flash_attention(q, k, v, dropout_p=0.1)
    with pytest.raises(ConfigError, match=r"mask \[37, 37\] needs a gradient"):
        flash_attention(q, k, v, attn_mask=torch.zeros(37, 37, requires_grad=True))


def test_a_mask_beside_causal_is_an_error(kernel):
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match="exclude each other"):
        kernel(q, k, v, attn_mask=MASKS["bool"], is_causal=True)


def test_eager_drops_as_torch_does_and_differentiates_its_mask():
    q, k, v, gradient = inputs()
    results = []
    for attention in (eager_attention, F.scaled_dot_product_attention):
        torch.manual_seed(0)
        bias = torch.zeros(37, 37, requires_grad=True)
        out = attention(q, k, v, attn_mask=bias, dropout_p=0.3)
        results.append((out.detach(), *torch.autograd.grad(out, bias, gradient)))
    assert max(distances(*results)) < 2e-6


@pytest.mark.parametrize(("queries", "keys"), [(37, 37), (30, 53), (53, 30)])
@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_the_blocks_that_run(queries, keys, causal):
    q, k, v, gradient = inputs(kv_heads=2, queries=queries, keys=keys)
    options = causal, 0.3, 12
    with FlopCounterMode(display=False) as inner:
        saved = flash.forward(q, k, v, None, *options)
    with FlopCounterMode(display=False) as inner_backward:
        flash.backward(gradient, q, k, v, *saved, None, *options)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    with FlopCounterMode(display=False) as forward:
        out, *_ = torch.ops.thrice.flash_attention(*leaves, None, *options)
    with FlopCounterMode(display=False) as backward:
        out.backward(gradient)
    assert forward.get_total_flops() == inner.get_total_flops() > 0
    assert backward.get_total_flops() == inner_backward.get_total_flops() == forward.get_total_flops() * 36 // 14
    if causal and queries == keys:
        whole = 2 * 2 * 4 * queries * keys * (8 + 6)
        assert forward.get_total_flops() < 0.7 * whole, "what lies above the diagonal is not computed"


def test_it_is_a_lawful_operator():
    """Schema, fake tensors (strides too) and autograd registration, by torch's own check."""
    q, k, v, _ = inputs(kv_heads=2)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    torch.library.opcheck(torch.ops.thrice.flash_attention, (*leaves, None, True, 0.3, 12))


@pytest.mark.parametrize("block", [0, -1])
def test_a_block_of_nothing_is_refused(block):
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match=f"block = {block}: a block has at least 1 query"):
        flash_attention(q, k, v, block=block)


@pytest.mark.parametrize("empty", ["samples", "queries", "keys"])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_sizes_are_taken_as_by_torch(empty, causal):
    samples, queries, keys = (0 if empty == name else 5 for name in ("samples", "queries", "keys"))
    q, k, v = (torch.ones(samples, 4, length, 8) for length in (queries, keys, keys))
    got, expected = (
        run(attention, q, k, v, torch.ones(q.shape), is_causal=causal)
        for attention in (KERNELS["flash"], F.scaled_dot_product_attention)
    )
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"attn_mask": torch.ones(37, 37).long()}, "attn_mask is int64: it has to be bool"),
        ({"attn_mask": torch.ones(37, 37).double()}, "attn_mask is float64"),
        ({"attn_mask": torch.ones(37).bool()}, r"attn_mask \[37\] does not fit scores \[2, 4, 37, 37\]"),
        ({"attn_mask": torch.ones(36, 37).bool()}, r"attn_mask \[36, 37\] does not fit"),
        ({"attn_mask": torch.ones(3, 1, 37, 37).bool()}, r"attn_mask \[3, 1, 37, 37\] does not fit"),
        ({"dropout_p": -0.1}, "dropout_p = -0.1 is no probability"),
        ({"dropout_p": 1.5}, "dropout_p = 1.5 is no probability"),
    ],
)
def test_what_torch_refuses_is_refused(options, why):
    q, k, _, _ = inputs()
    with pytest.raises((RuntimeError, IndexError)):
        F.scaled_dot_product_attention(q, k, k, **options)
    with pytest.raises(ValueError, match=why):
        flash_attention(q, k, k, **options)


def test_dtypes_that_differ_are_refused():
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match="query, key and value are float32, bfloat16, float32"):
        flash_attention(q, k.bfloat16(), v)
    with pytest.raises(ValueError, match="are int64, int64, int64"):
        flash_attention(q.long(), k.long(), v.long())


def test_a_second_derivative_is_refused_by_name():
    q, k, v, _ = inputs()
    (gradient,) = torch.autograd.grad(flash_attention(q.requires_grad_(), k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*eager"):
        gradient.square().sum().backward()
