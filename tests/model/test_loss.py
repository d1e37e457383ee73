"""The loss is a sum over the targets that count, in float32; in chunks it is the same loss, with the same gradient."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from thrice.errors import ConfigError
from thrice.model.loss import chunked_cross_entropy_sum, cross_entropy_sum
from thrice.observe.trace import Tracer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_sum_of_negative_log_probabilities(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, 7, (2, 5), generator=generator)
    targets[0, 1:3] = -100
    loss = cross_entropy_sum(logits, targets)
    logs = logits.detach().double().log_softmax(-1)
    expected = -sum(float(logs[b, t, targets[b, t]]) for b, t in (targets != -100).nonzero().tolist())
    assert loss.dtype is torch.float32
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-6)  # float32, whatever the logits' dtype
    loss.backward()
    one_hot = torch.nn.functional.one_hot(targets.clamp_min(0), 7)
    wanted = (logs.exp() - one_hot) * (targets != -100)[..., None]
    # the gradient is handed on in the logits' dtype
    assert torch.allclose(logits.grad.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_all_ignored_is_0_and_so_is_its_gradient():
    logits = torch.randn(1, 4, 7).requires_grad_()
    loss = cross_entropy_sum(logits, torch.full((1, 4), -100))
    loss.backward()
    assert loss.item() == 0
    assert bool((logits.grad == 0).all())


TOKENS, HIDDEN, VOCABULARY = (3, 11), 24, 301


def layer_and_batch(dtype=torch.float32, bias=True):
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(HIDDEN, VOCABULARY, bias=bias).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    hidden = torch.randn(*TOKENS, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(0, VOCABULARY, TOKENS, generator=generator)
    targets[0, :4] = -100
    return layer, hidden, targets


def whole(layer, hidden, targets):
    return cross_entropy_sum(layer(hidden), targets)


def chunked(layer, hidden, targets, chunk_tokens=7):
    return chunked_cross_entropy_sum(hidden, targets, layer.weight, layer.bias, chunk_tokens=chunk_tokens)


def run(loss, layer, hidden, targets, *, low=None, scale=1.0):
    """[loss, gradients of hidden and of the parameters that want one], in float64 and unscaled."""
    hidden = hidden.detach().requires_grad_()
    leaves = [hidden, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    with torch.autocast("cpu", low) if low else nullcontext():
        value = loss(layer, hidden, targets)
    assert value.dtype is torch.float32
    gradients = torch.autograd.grad(value * scale, leaves)
    return [value.detach().double(), *(gradient.double() / scale for gradient in gradients)]


def exact(layer, hidden, targets):
    """The same in float64 throughout."""
    wide = nn.Linear(HIDDEN, VOCABULARY, bias=layer.bias is not None, dtype=torch.float64)
    wide.load_state_dict(layer.state_dict())
    hidden = hidden.double().requires_grad_()
    value = F.cross_entropy(wide(hidden).flatten(0, 1), targets.flatten(), reduction="sum")
    return [value.detach(), *torch.autograd.grad(value, [hidden, *wide.parameters()])]


def distances(got, expected):
    return [float((g - e).norm() / e.norm()) for g, e in zip(got, expected, strict=True)]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 11, 33, 99])
@pytest.mark.parametrize("bias", [True, False])
def test_chunks_are_the_whole(chunk_tokens, bias):
    given = layer_and_batch(bias=bias)
    got = run(lambda *args: chunked(*args, chunk_tokens=chunk_tokens), *given)
    assert max(distances(got, exact(*given))) < 1e-6  # float32 sums of 301 terms


@pytest.mark.parametrize("scale", [1.0, 0.01, 65536.0])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_chunks_under_autocast_are_as_precise_as_the_whole(low, scale):
    given = layer_and_batch()
    expected = exact(*given)
    ours, plain = (distances(run(loss, *given, low=low, scale=scale), expected) for loss in (chunked, whole))
    # the losses of both are as far off as rounded logits make them; in chunks gradients are rounded less
    assert max(ours[0], plain[0]) < torch.finfo(low).eps / 100
    assert all(our <= 1.05 * their for our, their in zip(ours[1:], plain[1:], strict=True))


def test_probabilities_that_float16_cannot_hold_are_not_lost():
    """1 / 50,000 has 9 of float16's 11 bits, and 1 / 50,000,000 none: all of them together are nearly 1."""
    vocabulary = 50_000
    layer, hidden = nn.Linear(1, vocabulary, bias=False), torch.ones(1, 1, 1)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0] = 8.0  # the others have 2e-5 / 60 each
    lost = [run(loss, layer, hidden, torch.tensor([[0]]), low=torch.float16)[2][1:] for loss in (whole, chunked)]
    expected = 1 / (vocabulary - 1 + torch.tensor(8.0).double().exp())
    plain, ours = (float((gradient / expected - 1).abs().max()) for gradient in lost)
    assert ours < torch.finfo(torch.float16).eps < plain


def test_an_overflow_shows_in_the_gradient():
    layer, hidden, targets = layer_and_batch()
    got = run(chunked, layer, hidden.half(), targets, low=torch.float16, scale=1e6)
    assert not bool(got[1].isfinite().all())


def test_logits_that_overflow_where_nothing_counts_do_no_harm():
    layer, hidden, targets = layer_and_batch(bias=False)
    hidden[0, :4] = 1e36
    with torch.no_grad():
        layer.weight[0] = 1e6
    got, expected = (run(loss, layer, hidden, targets) for loss in (chunked, whole))
    assert all(bool(tensor.isfinite().all()) for tensor in got)
    assert max(distances(got, expected)) < 1e-6


def test_all_ignored_is_0_in_chunks_too():
    layer, hidden, targets = layer_and_batch()
    assert all(bool((tensor == 0).all()) for tensor in run(chunked, layer, hidden, torch.full_like(targets, -100)))


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_a_target_outside_the_vocabulary_is_an_error(wrong):
    layer, hidden, targets = layer_and_batch()
    targets[1, 1] = wrong
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked(layer, hidden, targets)


def test_parameters_in_bfloat16_gather_float32_gradients():
    layer, hidden, targets = layer_and_batch(torch.bfloat16)
    for parameter in layer.parameters():
        parameter.grad_dtype = torch.float32
    chunked(layer, hidden, targets).backward()
    expected = exact(layer, hidden, targets)
    assert layer.weight.grad.dtype is torch.float32
    assert max(distances([layer.weight.grad, layer.bias.grad], expected[2:])) < torch.finfo(torch.bfloat16).eps
    rounded = layer.weight.grad.bfloat16().float()
    assert not torch.equal(layer.weight.grad, rounded), "it was never rounded to bfloat16"


def test_a_tied_weight_gets_the_sum_of_both_uses():
    layer, _, targets = layer_and_batch(bias=False)
    tokens = torch.randint(0, VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(1))
    gradients = []
    for loss in (chunked, whole):
        value = loss(layer, F.embedding(tokens, layer.weight), targets)
        gradients += torch.autograd.grad(value, layer.weight)
    assert distances(gradients[:1], gradients[1:])[0] < 1e-6


def test_a_frozen_head_costs_no_gradient_and_evaluation_none_at_all():
    layer, hidden, targets = layer_and_batch()
    layer.requires_grad_(False)
    assert max(distances(run(chunked, layer, hidden, targets), exact(layer, hidden, targets)[:2])) < 1e-6
    layer.requires_grad_(True)
    hidden.requires_grad_(True)
    flops = []
    for mode in (torch.no_grad(), nullcontext()):
        with mode, Tracer(layer) as tracer:
            chunked(layer, hidden, targets)
        flops.append(tracer.flops)
    assert flops == [flops[1] // 3, 3 * 2 * 33 * HIDDEN * VOCABULARY]


def test_the_gradient_is_taken_once():
    layer, hidden, targets = layer_and_batch()
    loss = chunked(layer, hidden, targets)
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_the_logits_are_never_whole():
    layer, targets = nn.Linear(16, 4096, bias=False), torch.zeros(1, 512, dtype=torch.int64)
    peaks = []
    for loss in (whole, lambda *args: chunked(*args, chunk_tokens=32)):
        with Tracer(layer) as tracer:
            hidden = torch.zeros(1, 512, 16, requires_grad=True)
            loss(layer, hidden, targets).backward()
        peaks.append(tracer.trace().peak_bytes - 4 * 16 * 4096)
    logits_bytes = 4 * 512 * 4096
    assert peaks[0] > 2 * logits_bytes
    assert peaks[1] < logits_bytes / 4


def test_a_model_that_returns_no_tensor_is_told_so():
    with pytest.raises(ConfigError, match=r"model: it returns a tuple, and the loss takes its logits"):
        cross_entropy_sum((torch.zeros(1, 2, 3), None), torch.zeros(1, 2, dtype=torch.int64))
