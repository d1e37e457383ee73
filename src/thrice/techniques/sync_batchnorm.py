"""Batch norm over the whole global batch, on however many devices it lies.

A batch norm takes its statistics over what one device sees at once, so cutting the batch changes the training. Each
device has to see its share in one micro-batch; over several devices sums and counts are added up, so that devices with
more samples weigh more (torch's own SyncBatchNorm refuses CPUs), and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from thrice.errors import Problem, ThriceError
from thrice.runtime.dist import World
from thrice.runtime.session import Session
from thrice.runtime.technique import Claim, Slot, Stage
from thrice.spec.job import Job, no_ramp


@final
@dataclass(frozen=True, kw_only=True)
class SyncBatchNorm:
    name: ClassVar[str] = "sync_batchnorm"
    stage: ClassVar[Stage] = Stage.LAYERS
    slot: ClassVar[Slot] = Slot.NORMS

    enabled: bool = False

    @classmethod
    def examples(cls) -> Iterable[Self]:
        yield cls(enabled=True)

    def check(self) -> Iterator[Problem]:
        return iter(())

    def refuse(self, job: Job) -> Iterator[Problem]:
        if not self.enabled:
            return
        ledger = job.ledger()
        yield from no_ramp(job, self.name, "a batch norm over the whole batch")
        if ledger.ramp is None and ledger.grad_accum_steps > 1:
            yield Problem(
                key="sync_batchnorm",
                value=True,
                why=f"the {ledger.grad_accum_steps} micro-batches of a step each take statistics of "
                f"their own {ledger.micro_batch} samples and not of the global batch's {ledger.global_batch}",
                fix=f"micro_batch = {ledger.global_batch // ledger.data_parallel}, and leave grad_accum_steps out",
            )

    def apply(self, session: Session) -> str:
        if not self.enabled:
            return "off"
        norms = [module for module in session.model.modules() if isinstance(module, _BatchNorm)]
        if not norms:
            return "the model has no batch norm, so there is nothing to synchronise"
        if session.world.size == 1:
            return f"{len(norms)} batch norms; one device sees the whole batch, so there is nothing to synchronise"
        for norm in norms:
            norm.forward = partial(_normalised, norm, session.world)  # type: ignore[method-assign]
        return f"{len(norms)} batch norms take their statistics over {session.world.size} processes"

    def claim(self) -> Claim:
        return Claim.BITWISE

    def arithmetic(self) -> None:
        return None


class _Summed(torch.autograd.Function):
    """A sum over all ranks. Each rank's loss depends on it, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, world: World, tensor: Tensor) -> Tensor:
        ctx.world = world
        return world.sum_(tensor.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, ctx.world.sum_(gradients[0].clone())


def _summed(world: World, tensor: Tensor) -> Tensor:
    total: Tensor = _Summed.apply(world, tensor)  # type: ignore[no-untyped-call]
    return total


def _normalised(norm: _BatchNorm, world: World, inputs: Tensor) -> Tensor:
    """(N, C, ...) -> the same, as one batch norm would over the samples of all ranks; a rank's N may be 0. Collective.

    The mean first and then the squares around it: a difference of two large sums would lose the variance.
    """
    # evaluation is each rank's own: they have different numbers of batches
    if isinstance(inputs, FakeTensor) or not norm.training:
        return type(norm).forward(norm, inputs)
    norm._check_input_dim(inputs)  # type: ignore[no-untyped-call]
    wide = inputs.float() if inputs.dtype in (torch.bfloat16, torch.float16) else inputs
    around = [axis for axis in range(inputs.ndim) if axis != 1]
    shape = [1, -1] + [1] * (inputs.ndim - 2)
    count = world.totals(inputs.numel() / max(inputs.shape[1], 1))[0]
    if count < 2:
        raise ThriceError(
            f"a batch norm has {count:g} value for each channel in the whole batch, and a variance needs 2\n"
            "  a larger global_batch"
        )
    mean = _summed(world, wide.sum(around)) / count
    centred = wide - mean.view(shape)
    variance = _summed(world, centred.square().sum(around)) / count
    _track(norm, mean.detach(), variance.detach() * (count / (count - 1)))
    normal = centred * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.weight is not None:
        normal = normal * norm.weight.view(shape) + norm.bias.view(shape)
    like_inputs: Tensor = normal.to(inputs.dtype)
    return like_inputs


@torch.no_grad()
def _track(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """The running statistics, as torch keeps them: the variance is the unbiased one."""
    if norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    share = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), share)
