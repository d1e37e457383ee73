"""Numerical faults that other libraries shipped, each against the smallest input that shows it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from plain import CPU, gradients_taken, job, session, window
from thrice.data.batches import Batch
from thrice.model.attention import causal_attention
from thrice.spec.job import Evaluation, Optimizer
from thrice.step import train_step
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import Recompute
from thrice.train import train

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-pure")


def precision(mode, **fields):
    scale = {"initial_scale": 1.0} if mode == "fp16" else {}
    return Precision(mode=mode, **scale, **fields)


class Scale(nn.Module):
    """x (B, T) times one weight, in the weight's dtype."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, 1), weight))

    def forward(self, x):
        return x.to(self.weight.dtype) * self.weight


def total(output, targets):
    return output.float().sum()


@pytest.mark.parametrize("mode", PRECISIONS)
def test_256_and_1_add_up_across_micro_batches(mode):
    ours = session(job(techniques=(precision(mode),)), model=Scale(), loss=total)
    taken = gradients_taken(ours)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    values = (512.0, 2.0)  # halved, for there are two targets
    pieces = [Batch.of(inputs=torch.tensor([[v]]), targets=zero, sample_ids=(i,)) for i, v in enumerate(values)]
    train_step(ours, pieces)
    assert taken["weight"].item() == 257.0
    # what bfloat16 would have made of it
    assert (torch.tensor(256.0, dtype=torch.bfloat16) + 1).item() == 256.0


@pytest.mark.parametrize("strategy", ["full", "every_k", "boundary", "attention_only", "selective"])
@pytest.mark.parametrize("mode", PRECISIONS)
def test_recomputed_dropout_has_the_same_masks(strategy, mode):
    decoder = replace(job().decoder, dropout=0.5)
    results = []
    for recompute in ((), (Recompute(strategy=strategy),)):
        ours = session(job(decoder=decoder, techniques=(precision(mode), *recompute)))
        taken = gradients_taken(ours)
        torch.manual_seed(1)
        results.append((train_step(ours, window(9, 16)), taken, torch.get_rng_state()))
    (plain, gradients, random), (recomputed, others, random_after) = results
    assert plain == recomputed
    assert gradients.keys() == others.keys()
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
    assert torch.equal(random, random_after)


def test_recomputed_dropout_with_other_masks_is_seen():
    """The test above can fail: a recomputation that draws anew gives another gradient."""
    gradients = []
    for faulty in (False, True):
        ours = session(job(decoder=replace(job().decoder, dropout=0.5)))
        if faulty:
            for block in ours.model.blocks:
                forward = block.forward
                block.forward = lambda *args, f=forward: checkpoint(
                    f, *args, use_reentrant=False, preserve_rng_state=False
                )
        taken = gradients_taken(ours)
        torch.manual_seed(1)
        train_step(ours, window(9, 16))
        gradients.append(taken["embedding.weight"])
    assert (gradients[0] - gradients[1]).norm() > 0.1 * gradients[0].norm()


STEPS, LR, WIDTH = 100, 6e-4, 4096


class Norm(nn.Module):
    """A norm's weight at 1.0, in front of a loss that wants it smaller."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.weight


def norm_after(techniques):
    """The mean of the weight after 100 AdamW steps, from 1.0."""
    spec = job(lr=LR, max_steps=STEPS, optimizer=Optimizer(weight_decay=0.0), techniques=techniques)
    ours = session(spec, model=Norm(), loss=total)
    generator = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        # gradients of one sign and unequal size, so that AdamW's own step varies from weight to weight
        inputs = torch.rand(1, WIDTH, generator=generator) + 0.1
        batch = Batch.of(inputs=inputs.to(ours.model.weight.dtype), targets=torch.zeros(1, 1), sample_ids=(step,))
        assert train_step(ours, [batch]).taken
    return ours.model.weight.detach().double()


def test_a_norm_weight_in_bfloat16_moves_as_far_as_in_float32():
    expected = norm_after(())
    assert expected.mean() < 0.95
    below_1 = 2.0**-8  # from one bfloat16 to the next
    share = LR / below_1  # of a step of AdamW in that distance: the probability of rounding away from the weight
    walk = below_1 * (STEPS * share * (1 - share)) ** 0.5  # standard deviation after all steps, 0.014
    stochastic = norm_after((Precision(mode="bf16-pure", rounding="stochastic"),))
    assert (stochastic - expected).abs().max() < 6 * walk  # of 4096 draws the largest is at 4
    assert abs(stochastic.mean() - expected.mean()) < 4 * walk / WIDTH**0.5
    compensated = norm_after((Precision(mode="bf16-pure", rounding="compensated"),))
    # what is stored is rounded once, whatever came before; a tenth more for the compensation's own rounding
    assert (compensated - expected).abs().max() < 1.1 * below_1 / 2

    plain = Norm().to(torch.bfloat16)  # plain rounding: not one weight moves
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(STEPS):
        plain.weight.grad = torch.rand(WIDTH, dtype=torch.bfloat16) + 0.1
        optimizer.step()
    assert bool((plain.weight == 1.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_with_scores_near_the_limit_is_finite(dtype, kv_heads):
    """No mask of -1e9, which float16 cannot hold: causality is the kernel's own."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 8, 4, 8, generator=generator)
    k, v = torch.randn(2, 2, 8, kv_heads, 8, generator=generator)
    inputs = [(100 * q).to(dtype), (100 * k).to(dtype), v.to(dtype)]  # scores of ±40,000; float16 ends at 65,504
    for x in inputs:
        x.requires_grad_()
    out = causal_attention(F.scaled_dot_product_attention, *inputs)
    out.float().square().sum().backward()
    assert out.dtype is dtype
    assert all(bool(x.isfinite().all()) for x in (out, *(x.grad for x in inputs)))
    # the first position sees itself alone
    first = inputs[2][:, 0].repeat_interleave(4 // kv_heads, dim=1)
    assert torch.equal(out[:, 0], first)
    # plain softmax over the allowed scores, in float64
    q, k, v = (x.detach().double().transpose(1, 2) for x in inputs)
    k, v = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / 8**0.5
    scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
    expected = (scores.softmax(-1) @ v).transpose(1, 2)
    # float32 scores of 4e4 are off by up to 0.004, and weights by as much; bfloat16 rounds the result by 0.008
    assert float((out.detach().double() - expected).abs().max()) < 0.02


def test_a_fault_of_minus_1e9_would_be_seen():
    scores = torch.zeros(2, 2, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="overflow"):
        scores.masked_fill(torch.ones(2, 2).triu(1).bool(), -1e9)


def test_mfu_is_null_where_the_peak_is_unknown(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("thrice.compose.default_device", lambda: CPU)
    lines: list[str] = []
    asked = job(data=(str(corpus),), max_steps=2, run_dir=str(tmp_path / "run"), evaluation=Evaluation(fraction=0.1))
    train(asked, say=lines.append)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 2
    assert all(row["mfu"] is None for row in steps)
    header = next(line for line in lines if " mfu " in line)
    assert any(" n/a " in line for line in lines[lines.index(header) :])
