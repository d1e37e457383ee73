"""The loss is a sum over the targets that count, in float32."""

from __future__ import annotations

import pytest
import torch

from thrice.model.loss import cross_entropy_sum


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
