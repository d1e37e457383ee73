"""On one device the whole batch has to be one micro-batch, and it is an identity; over ranks it is one batch norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plain import SEQUENCE, VOCABULARY, job, same, session, state, window
from thrice.compose import compose, refuse
from thrice.data.batches import Batch
from thrice.errors import ThriceError
from thrice.runtime.dist import World
from thrice.spec.job import BatchRamp, Optimizer
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


# over ranks


class Images(nn.Module):
    """(B, 1, 6, 6) -> (B, 1, 5): one prediction an image, through batch norms of two and of four dimensions."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3, momentum=momentum)
        self.last = nn.Linear(3 * 16, 6)
        self.last_norm = nn.BatchNorm1d(6, momentum=momentum, affine=False)
        self.head = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.convolution(images))).flatten(1)
        return self.head(self.last_norm(self.last(hidden)))[:, None]


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shifted = 100.0 + torch.randn(count, 1, 6, 6, generator=generator) * torch.arange(1, count + 1).view(-1, 1, 1, 1)
    return shifted, torch.randint(0, 5, (count, 1), generator=generator)


def synchronised(world: World, counts: list[int], momentum: float | None, steps: int):
    """Gradients of the last step, parameters and running statistics after it; a rank has counts[rank] images."""
    sgd = Optimizer(name="sgd", weight_decay=0.0, clip=None)
    asked = job(processes=world.size, global_batch=world.size, micro_batch=1, techniques=(ON,), optimizer=sgd)
    made = compose(asked, vocabulary=5, model=Images(momentum), world=world)
    inputs, targets = images(sum(counts))
    first = sum(counts[: world.rank])
    own = slice(first, first + counts[world.rank])
    batch = Batch.of(inputs[own], targets[own], tuple(range(first, first + counts[world.rank])))
    gradients: dict[str, Tensor] = {}
    made.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: p.grad.clone() for name, p in made.model.named_parameters()})
    )
    for _ in range(steps):
        train_step(made, [batch])
    return gradients, {name: tensor.detach().clone() for name, tensor in made.model.state_dict().items()}


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("counts", [[4, 6], [1, 9], [10, 0]], ids=str)
def test_unequal_ranks_are_one_batch_norm(counts: list[int], momentum: float | None, workers) -> None:
    """pytorch#22192, #36382: ranks of 4 and 6 are one norm over 10, gradients and running statistics too."""
    model = Images(momentum)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = images(10)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    right = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradients, state_ in workers(2).call(synchronised, counts, momentum, 2):
        # float32 around a mean of 100, in which a spread of 1 keeps five digits; biases before a norm have no gradient
        torch.testing.assert_close(gradients, right, rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(state_, model.state_dict(), rtol=1e-3, atol=2e-5)


def too_few(world: World) -> None:
    synchronised(world, [1, 0], 0.1, 1)


@pytest.mark.xdist_group("processes")
def test_one_value_has_no_variance(workers) -> None:
    with pytest.raises(ThriceError, match="a variance needs 2"):
        workers(2).call(too_few)
