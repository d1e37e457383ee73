"""Replicas of the whole model, each on its own share of the global batch, their gradients added up in backward.

torch's DistributedDataParallel (Li et al., arXiv:2006.15704): gradients lie in buckets, and a bucket's all-reduce runs
while backward goes on; the micro-batches of a window before its last exchange nothing. Gradients are *summed*: the loss
is divided by the targets of the whole window on all ranks, so that ranks with more targets count for more. With
`compression` they travel in bfloat16, in half the bytes and with its rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from thrice.errors import Problem, ThriceError
from thrice.runtime.fakes import faked
from thrice.runtime.replicas import BUCKET_BYTES, MIB, filled, share_weights
from thrice.runtime.session import Session
from thrice.runtime.technique import Arithmetic, Claim, Slot, Stage
from thrice.spec.job import Job, at_least, positive


@final
@dataclass(frozen=True, kw_only=True)
class DataParallel:
    name: ClassVar[str] = "data_parallel"
    stage: ClassVar[Stage] = Stage.REPLICATE
    slot: ClassVar[Slot] = Slot.REPLICATE

    degree: int | Literal["auto"] = "auto"
    """Replicas; "auto" is what the other degrees leave of `processes`."""
    bucket_bytes: int = BUCKET_BYTES
    """Of gradients that travel together: more is less latency, less is more overlap with backward."""
    compression: Literal["none", "bf16"] = "none"
    """What gradients are cast to on their way."""

    @classmethod
    def examples(cls) -> Iterable[Self]:
        yield cls()
        yield cls(compression="bf16")

    def check(self) -> Iterator[Problem]:
        if self.degree != "auto":
            yield from at_least(1, degree=self.degree)
        yield from positive(bucket_bytes=self.bucket_bytes)

    def refuse(self, job: Job) -> Iterator[Problem]:
        return iter(())

    def apply(self, session: Session) -> str:
        world = session.world
        if session.replicas is not None:
            return "gradients are added up where they are divided"
        if world.size == 1:
            replicas = session.ledger.data_parallel
            return (
                "one replica, nothing to exchange"
                if replicas == 1
                else f"one of {replicas} replicas, without its buckets"
            )
        share_weights(session.model, world)
        unused = _unused(session)
        sent = torch.bfloat16 if self.compression == "bf16" else None
        said = f"{world.size} replicas"
        if any(_is_wider(parameter) for parameter in session.model.parameters()):
            session.replicas = AfterBackward(session, self.bucket_bytes, sent)
            said += "; float32 gradients of bfloat16 parameters are exchanged after backward"
        else:
            session.replicas = InBackward(session, self.bucket_bytes, sent, unused=unused != [])
            said += (
                f", gradients exchanged within the last backward of a step, in buckets of {self.bucket_bytes:,} bytes"
            )
        if sent is not None:
            said += "; sent in bfloat16"
        if unused is None:
            said += "; which parameters a step does not use is looked for in each"
        elif unused:
            said += f"; unused in forward, and so not trained: {', '.join(unused)}"
        return said

    def claim(self) -> Claim:
        return Claim.ROUNDING if self.compression == "none" else Claim.LOWER_PRECISION

    def arithmetic(self) -> Arithmetic | None:
        return None if self.compression == "none" else Arithmetic(reduced=torch.bfloat16)


class Forward(nn.Module):
    """A session's forward and loss as one module, for DDP: whatever later stages make of them is what it calls."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.model = session.model
        self._loss = session.unwatched

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._loss(inputs, targets)


class InBackward:
    """DDP around the session's forward and loss; `unused` where some parameter may have no part in them."""

    def __init__(self, session: Session, bucket_bytes: int, sent: torch.dtype | None, *, unused: bool) -> None:
        forward = Forward(session)
        # weights and buffers were shared once; sent again before each forward, buffers would cost and change nothing
        buffers = [name for name, _ in forward.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(forward, buffers)  # type: ignore[no-untyped-call]
        self._ddp = DistributedDataParallel(
            forward,
            bucket_cap_mb=bucket_bytes / MIB,
            gradient_as_bucket_view=True,
            find_unused_parameters=unused,
            init_sync=False,
        )
        self._ddp.register_comm_hook(None, lambda _, bucket: self._summed(bucket))
        self._rank, self._sent, self._is_complete = session.world.rank, sent, False

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss_sum: Tensor = self._ddp(inputs, targets)
        return loss_sum

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self._is_complete = False
        with nullcontext() if last else self._ddp.no_sync():
            yield
        if last and not self._is_complete:  # DDP itself would say it at the next forward, one wrong update later
            missing = [name for name, parameter in self._ddp.module.model.named_parameters() if parameter.grad is None]
            raise ThriceError(
                f"rank {self._rank} did not use {', '.join(missing) or 'some parameter'} in this step, and does in "
                "others; nothing was updated\n  a parameter has to be used by every rank in every step, or by none"
            )

    def _summed(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self._is_complete |= bucket.is_last()
        total = bucket.buffer()
        moving = total if self._sent is None else total.to(self._sent)
        work = dist.all_reduce(moving, async_op=True)
        assert work is not None
        future: torch.futures.Future[list[Tensor]] = work.get_future()
        return future.then(lambda done: total if moving is total else total.copy_(moving))


class AfterBackward:
    """Gradients added up when backward is through: for those wider than their parameters DDP has no buckets."""

    def __init__(self, session: Session, bucket_bytes: int, sent: torch.dtype | None) -> None:
        self._session, self._bucket_bytes, self._sent = session, bucket_bytes, sent
        self.loss = session.unwatched

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return self._exchanging() if last else nullcontext()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        yield
        used = [(n, p) for n, p in self._session.model.named_parameters() if p.grad is not None]
        for bucket in filled(used, self._bucket_bytes):
            gradients = [parameter.grad for _, parameter in bucket if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            flat = self._session.world.sum_(flat if self._sent is None else flat.to(self._sent))
            start = 0
            for gradient in gradients:
                gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
                start += gradient.numel()


def _is_wider(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.grad_dtype not in (None, parameter.dtype)


def _unused(session: Session) -> list[str] | None:
    """Trainable parameters that a micro-batch leaves without a gradient, found on fake tensors, or None."""
    with torch.random.fork_rng(devices=[]), faked(session.model):
        try:
            torch.autograd.backward(session.loss_sum(session.example()))
        except Exception:  # a caller's model may take other inputs than a job's tokens
            return None
        return [n for n, p in session.model.named_parameters() if p.requires_grad and p.grad is None]
