"""Batch norm over the whole global batch, on however many devices it lies.

A batch norm takes its statistics over what one device sees at once, so cutting the batch changes the training. On
one device the whole batch has to be one micro-batch, and then there is nothing to synchronise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Self, final

from torch.nn.modules.batchnorm import _BatchNorm

from thrice.errors import Problem
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
        norms = sum(isinstance(module, _BatchNorm) for module in session.model.modules())
        if not norms:
            return "the model has no batch norm, so there is nothing to synchronise"
        return f"{norms} batch norms; one device sees the whole batch, so there is nothing to synchronise"

    def claim(self) -> Claim:
        return Claim.BITWISE

    def arithmetic(self) -> None:
        return None
