"""Each parameter is updated within backward, as soon as its gradient is complete, and the gradient is freed.

Gradients of the whole model never exist at once: their memory falls to that of the largest. What needs all of them
before the first update (clipping by the global norm, a sum over micro-batches, the decision to skip a step) cannot
be had. See LOMO (arXiv:2306.09782), which fuses the update in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Self, final

import torch

from thrice.errors import Problem
from thrice.optim.in_backward import InBackward
from thrice.runtime.session import Session
from thrice.runtime.technique import Claim, Slot, Stage
from thrice.spec.job import Job, no_ramp


@final
@dataclass(frozen=True, kw_only=True)
class OptimizerInBackward:
    name: ClassVar[str] = "optimizer_in_backward"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    slot: ClassVar[Slot] = Slot.UPDATE

    enabled: bool = False

    @classmethod
    def examples(cls) -> Iterable[Self]:
        yield cls(enabled=True)

    def check(self) -> Iterator[Problem]:
        return iter(())

    def refuse(self, job: Job) -> Iterator[Problem]:
        if not self.enabled:
            return
        if job.optimizer.clip is not None:
            yield Problem(
                key="optimizer.clip",
                value=job.optimizer.clip,
                why="clipping needs the norm of the whole gradient before the first update, and optimizer_in_backward "
                "has freed most of it by then",
                fix='optimizer.clip = "none", or leave optimizer_in_backward out',
            )
        ledger = job.ledger()
        if ledger.data_parallel > 1:
            yield Problem(
                key="optimizer_in_backward",
                value=True,
                why=f"a gradient is whole when {ledger.data_parallel} processes have added up theirs, after backward",
                fix="processes = 1, or leave optimizer_in_backward out",
            )
        yield from no_ramp(job, self.name, self.name)
        if ledger.ramp is None and ledger.grad_accum_steps > 1:
            yield Problem(
                key="optimizer_in_backward",
                value=True,
                why=f"{ledger.grad_accum_steps} micro-batches add up to one gradient, and there is none left to add to "
                "after the first",
                fix=f"micro_batch = {ledger.global_batch // ledger.data_parallel} and grad_accum_steps = 1, with "
                'recompute = "full" for the memory',
            )
        if any(a.computed is torch.float16 for t in job.techniques if (a := t.arithmetic()) is not None):
            yield Problem(
                key="optimizer_in_backward",
                value=True,
                why="loss scaling skips the whole step where one gradient overflows, and by then others are applied",
                fix='precision = "bf16", which needs no loss scale',
            )

    def apply(self, session: Session) -> str:
        if not self.enabled:
            return "off"
        session.in_backward = InBackward()
        return "each gradient is applied and freed when it is complete; a step that is not finite cannot be undone"

    def claim(self) -> Claim:
        return Claim.BITWISE

    def arithmetic(self) -> None:
        return None
