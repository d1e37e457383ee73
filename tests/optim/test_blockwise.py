"""8 bits by block: the published code, the nearest of it, and nothing that becomes 0 or NaN by storage."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thrice.optim.blockwise import BLOCK, dequantise, dynamic_code, quantise

SIGNS = pytest.mark.parametrize("signed", [True, False])
SHAPES = [(256,), (4, 256), (3, 1000), (7,), (1,), (5, 3, 11)]


def values(shape, signed, seed=0):
    """Magnitudes over fourteen decades, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10 ** (-14 * torch.rand(shape, generator=generator))
    x[torch.rand(shape, generator=generator) < 0.1] = 0
    return x if signed else x.abs()


def published(signed):
    """Written as its authors' library writes it: fractions of a decade by the number of bits left for them."""
    found = [0.0, 1.0]
    for exponent in range(7):
        boundaries = torch.linspace(0.1, 1, 2**exponent * (1 if signed else 2) + 1, dtype=torch.float64)
        means = (boundaries[:-1] + boundaries[1:]) / 2 * 10 ** (-6 + exponent)
        found += means.tolist() + (-means if signed else means[:0]).tolist()
    return torch.tensor(sorted(found))


def nearest(x, signed):
    """(codes, scale of each element) by trying all 256, in float64."""
    code = torch.from_numpy(dynamic_code(signed=signed)).double()
    scales = torch.cat([part.abs().amax().expand(part.numel()) for part in x.flatten().split(BLOCK)]).double()
    scaled = x.flatten().double() / torch.where(scales > 0, scales, 1.0)
    distance = (scaled.unsqueeze(1) - code).abs()
    if not signed:
        distance[scaled > 0, 0] = torch.inf
    return distance.argmin(1).view(x.shape), scales.view(x.shape)


@SIGNS
def test_the_code_is_the_published_one(signed):
    code = torch.from_numpy(dynamic_code(signed=signed))
    assert code.shape == code.unique().shape == (256,)
    # float32 either way, rounded once or twice
    assert torch.allclose(code, published(signed), rtol=2.0**-23, atol=0)
    assert float(code[-1]) == 1.0
    assert (float(code[0]) < -0.99) if signed else (float(code[0]) == 0.0)


@SIGNS
@pytest.mark.parametrize("shape", SHAPES)
def test_each_element_gets_the_nearest_code(signed, shape):
    x = values(shape, signed)
    codes, scales = quantise(x, signed=signed)
    assert (codes.dtype, codes.shape) == (torch.uint8, x.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (-(-x.numel() // BLOCK),))
    expected, scale = nearest(x, signed)
    code = torch.from_numpy(dynamic_code(signed=signed)).double()
    # where they differ, the element lies between two codes to within float32's rounding of its share of the scale
    error, least = ((x.double() / scale.clamp_min(1e-300) - code[c.long()]).abs() for c in (codes, expected))
    assert bool((error <= least + 2.0**-23 * x.double().abs() / scale.clamp_min(1e-300)).all())
    assert float((codes == expected).double().mean()) > 0.999
    got = dequantise(codes, scales, signed=signed)
    assert torch.allclose(got.double(), code[codes.long()] * scale, rtol=2.0**-23, atol=0)


@SIGNS
def test_a_large_tensor_is_quantised_in_pieces_as_in_one(signed):
    """More than one piece, the last one short, in the middle of a block."""
    x = values((5, BLOCK * 1000 + 7), signed)
    codes, scales = quantise(x, signed=signed)
    flat = x.flatten()
    for begin in (0, BLOCK * 3000, BLOCK * 4999):
        part = flat[begin : begin + 2 * BLOCK]
        some, few = quantise(part, signed=signed)
        assert torch.equal(codes.flatten()[begin : begin + 2 * BLOCK], some)
        assert torch.equal(scales[begin // BLOCK : begin // BLOCK + len(few)], few)
        got = dequantise(codes, scales, signed=signed).flatten()[begin : begin + 2 * BLOCK]
        assert torch.equal(got, dequantise(some, few, signed=signed))


@SIGNS
def test_what_the_code_holds_is_kept_exactly(signed):
    x = torch.from_numpy(dynamic_code(signed=signed)).flip(0).contiguous()
    assert torch.equal(dequantise(*quantise(x, signed=signed), signed=signed), x)
    again = values((3, 300), signed)
    once = dequantise(*quantise(again, signed=signed), signed=signed)
    assert torch.equal(dequantise(*quantise(once, signed=signed), signed=signed), once) == (not signed)
    # a block whose largest is negative has no -1 to be: it shrinks by 0.7% a time, and only that one


@SIGNS
def test_zeros_stay_zeros_and_no_block_becomes_nan(signed):
    x = torch.zeros(3 * BLOCK)
    x[BLOCK] = 1e-45  # the least float32 there is
    got = dequantise(*quantise(x, signed=signed), signed=signed)
    assert torch.equal(got[:BLOCK], x[:BLOCK])
    assert torch.equal(got[2 * BLOCK :], x[2 * BLOCK :])
    assert bool(got.isfinite().all())
    assert float(got.abs().max()) < 2e-38


def test_nothing_above_0_becomes_0_where_nothing_is_negative():
    x = torch.full((BLOCK,), 1e-30)
    x[0], x[1] = 1.0, 0.0
    got = dequantise(*quantise(x, signed=False), signed=False)
    assert (float(got[0]), float(got[1])) == (1.0, 0.0)
    assert float(got[2:].min()) == float(dynamic_code(signed=False)[1]) > 0
    # with a sign it may: a first moment of 0 moves nothing
    assert float(dequantise(*quantise(x, signed=True), signed=True)[2:].max()) == 0


def test_nan_is_not_hidden():
    x = torch.ones(2 * BLOCK)
    x[3] = torch.nan
    got = dequantise(*quantise(x, signed=True), signed=True)
    assert bool(got[:BLOCK].isnan().all())
    assert bool((got[BLOCK:] == 1).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_known_without_values(shape):
    with FakeTensorMode(allow_non_fake_inputs=True):
        codes, scales = quantise(torch.empty(shape), signed=True)
        got = dequantise(codes, scales, signed=True)
    assert (codes.shape, got.shape, got.dtype) == (shape, shape, torch.float32)
    # nothing fake is left behind
    x = values(shape, True)
    assert type(dequantise(*quantise(x, signed=True), signed=True)) is torch.Tensor
