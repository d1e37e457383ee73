"""On one device the whole batch has to be one micro-batch; then it is an identity."""

from __future__ import annotations

import torch
from torch import nn

from plain import SEQUENCE, VOCABULARY, job, same, session, state, window
from thrice.compose import compose, refuse
from thrice.spec.job import BatchRamp
from thrice.step import train_step
from thrice.techniques.sync_batchnorm import SyncBatchNorm

ON = SyncBatchNorm(enabled=True)


class Normed(nn.Module):
    """Logits of each position from an embedding, batch norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens_BT).transpose(1, 2)).transpose(1, 2))


def test_an_identity_on_one_device() -> None:
    synchronised = session(job(micro_batch=4, techniques=(ON,)), Normed())
    plain = session(job(micro_batch=4), Normed())
    assert synchronised.applied["sync_batchnorm"].startswith("1 batch norms")
    for step in range(2):
        for each in (synchronised, plain):
            train_step(each, window(4 * SEQUENCE, seed=step, samples=4))
    assert same(state(synchronised), state(plain))


def test_a_batch_that_is_cut_is_refused_with_its_numbers() -> None:
    (problem,) = refuse(job(micro_batch=1, techniques=(ON,)))
    assert "4 micro-batches" in problem.why
    assert "its own 1 samples" in problem.why.replace("their own", "its own")
    assert problem.fix.startswith("micro_batch = 4")
    assert not list(refuse(job(micro_batch=1, techniques=(SyncBatchNorm(),))))


def test_a_batch_that_grows_is_always_cut_and_no_size_is_offered() -> None:
    (problem,) = refuse(job(micro_batch=2, batch_ramp=BatchRamp(start=2, samples=8), techniques=(ON,)))
    assert (problem.key, problem.value) == ("batch_ramp.start", 2)
    assert problem.fix == "keep one of batch_ramp and sync_batchnorm"


def test_a_model_without_batch_norm_is_told_so() -> None:
    assert (
        "no batch norm"
        in compose(job(micro_batch=4, techniques=(ON,)), vocabulary=VOCABULARY).applied["sync_batchnorm"]
    )
