"""One assembled training: what `compose` and the techniques wrote, and what the training step reads.

Each slot has one writer. Techniques read what earlier stages wrote here, never each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from thrice.data.batches import Batch, Position
from thrice.optim.in_backward import InBackward
from thrice.optim.scaler import LossScaler
from thrice.optim.share import Share
from thrice.optim.stored import Rounding, StateFormat
from thrice.runtime.dist import ALONE, World
from thrice.spec.job import Job
from thrice.spec.workload import Ledger


@dataclass(kw_only=True)
class Progress:
    """How far the run is; everything that a resume must find again besides tensors."""

    step: int = 0
    """Optimizer steps taken: what the schedule counts."""
    samples: int = 0
    """Samples of those steps: what a batch ramp counts."""
    skipped_steps: int = 0
    """Windows whose step the loss scaler skipped, or that had no target."""
    position: Position = field(default_factory=lambda: Position(epoch=0, offset=0))
    """Where the next window begins in the data."""
    tokens: int = 0
    """Targets that took part in a step."""


class Replicas(Protocol):
    """How the ranks of a world come to one gradient."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of the loss over a micro-batch's targets, by a forward whose backward is watched."""
        ...

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of each micro-batch of a window; collective where it is the `last` one.

        After that every gradient is the sum over all ranks: of each parameter, or of each piece where there are shards.
        """
        ...


class Shards(Protocol):
    """How the ranks of a world divide the update."""

    @property
    def share(self) -> Share:
        """What this rank's optimizer updates."""
        ...

    def updated(self) -> None:
        """Makes every parameter whole, after the update; collective."""
        ...

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, on rank 0 alone, out of each rank's for its pieces; collective.

        A name is a parameter's, or "parameter:state" for one of its states.
        """
        ...


@dataclass(kw_only=True)
class Session:
    job: Job
    ledger: Ledger
    device: torch.device
    model: nn.Module
    output: Callable[[Tensor], Tensor]
    """Inputs -> what the loss takes: the model's own output, or what its head would have turned into it (head)."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """(output, targets) -> the sum of the loss over the targets that count, a float32 scalar (head)."""
    example: Callable[[], Batch]
    """A micro-batch of the job's full size, its content of no meaning; for what measures before it runs."""
    lr_at: Callable[[int, int], float]
    """(steps taken, samples of them) -> the learning rate of the next one."""
    compute: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around the forward of each micro-batch (numerics)."""
    scaler: LossScaler | None = None
    """Loss scaling (numerics)."""
    rounding: Rounding | None = None
    """How an update is rounded where parameters are stored in bfloat16 (numerics)."""
    states: StateFormat | None = None
    """How the optimizer's states are stored between updates; None in float32 (states)."""
    world: World = ALONE
    """The processes that train together; written by `compose`."""
    replicas: Replicas | None = None
    """Adds up the gradients of the world's ranks; None where there is one (replicate)."""
    shards: Shards | None = None
    """Divides the update among the world's ranks; None where each makes all of it (shard)."""
    in_backward: InBackward | None = None
    """Updates each parameter, and frees its gradient, within backward (update)."""
    applied: dict[str, str] = field(default_factory=dict)
    """Technique -> what it did, in one line; written by `compose`."""
    progress: Progress = field(default_factory=Progress)
    _optimizer: torch.optim.Optimizer | None = None

    def unwatched(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and loss, by what techniques have made of them up to now."""
        return self.loss(self.output(inputs), targets)

    def loss_sum(self, batch: Batch) -> Tensor:
        """The sum of the loss over a micro-batch's targets, a float32 scalar; this rank's, and no backward follows."""
        with self.compute():
            return self.unwatched(batch.inputs, batch.targets)

    def watched_loss_sum(self, batch: Batch) -> Tensor:
        """The same, for a backward."""
        loss = self.unwatched if self.replicas is None else self.replicas.loss
        with self.compute():
            return loss(batch.inputs, batch.targets)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Entered around forward and backward of each micro-batch of a window."""
        return nullcontext() if self.replicas is None else self.replicas.micro_batch(last=last)

    def trained(self) -> Iterable[tuple[str, Tensor]]:
        """What this rank's optimizer updates: parameters, or pieces under their parameters' names."""
        return self.model.named_parameters() if self.shards is None else self.shards.share.named().items()

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of the whole gradient, whose parts on this rank are given; the same on all."""
        norm = nn.utils.get_total_norm(gradients)
        if self.shards is None:
            return norm
        return self.world.sum_(norm.to(self.device, torch.float64).square()).sqrt().to(norm.dtype)

    def updated(self) -> None:
        """Called after each update."""
        if self.shards is not None:
            self.shards.updated()

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What belongs to whole parameters, on rank 0 at least, out of what belongs to this rank's pieces."""
        return dict(tensors) if self.shards is None else self.shards.whole(tensors)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "techniques apply before the optimizer is built"
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer


def scalar(tensor: Tensor) -> float:
    """The value of a one-element tensor; 1.0 in a rehearsal, whose tensors have no values."""
    return 1.0 if isinstance(tensor, FakeTensor) else float(tensor)
