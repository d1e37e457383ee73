"""The precision of compute and of parameters.

`fp32` is the reference. `bf16` and `fp16` keep float32 master parameters and compute matrix products in the
low precision through autocast, with softmax, norms and the loss in float32; `fp16` adds dynamic loss scaling
(arXiv:1710.03740), `bf16` has float32's range and needs none. `bf16-pure` stores the parameters in bfloat16
too, gradients accumulating in float32, and rounds updates so that small ones are not lost (arXiv:2010.06192).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, Literal, Self, final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from thrice.errors import Problem
from thrice.optim.scaler import LossScaler
from thrice.optim.stored import Rounding
from thrice.runtime.session import Session
from thrice.runtime.stopwatch import seconds
from thrice.runtime.technique import Arithmetic, Claim, Slot, Stage
from thrice.spec.job import Job, at_least, positive

ARITHMETIC = {
    "bf16": Arithmetic(stored=torch.float32, computed=torch.bfloat16),
    "fp16": Arithmetic(stored=torch.float32, computed=torch.float16),
    "bf16-pure": Arithmetic(stored=torch.bfloat16, computed=None),
}


@final
@dataclass(frozen=True, kw_only=True)
class Precision:
    name: ClassVar[str] = "precision"
    stage: ClassVar[Stage] = Stage.NUMERICS
    slot: ClassVar[Slot] = Slot.NUMERICS

    mode: Literal["fp32", "bf16", "fp16", "bf16-pure"] = "fp32"
    rounding: Rounding | None = None
    """bf16-pure: how an update is written back; "stochastic" where not given."""
    initial_scale: float | None = None
    """fp16: the loss scale of the first step; 65536 where not given."""
    growth_interval: int | None = None
    """fp16: good steps in a row before the scale doubles; 2000 where not given."""
    max_skipped_steps: int | None = None
    """fp16: the run stops after this many skipped steps in a row; 25 where not given."""

    @classmethod
    def examples(cls) -> Iterable[Self]:
        yield cls(mode="fp32")
        yield cls(mode="bf16")
        yield cls(mode="fp16", initial_scale=1024.0)
        yield cls(mode="bf16-pure", rounding="stochastic")
        yield cls(mode="bf16-pure", rounding="compensated")

    def check(self) -> Iterator[Problem]:
        yield from positive(initial_scale=self.initial_scale)
        yield from at_least(1, growth_interval=self.growth_interval, max_skipped_steps=self.max_skipped_steps)
        if self.mode != "fp16":
            scaling = (self.initial_scale, self.growth_interval, self.max_skipped_steps)
            for key, value in zip(("initial_scale", "growth_interval", "max_skipped_steps"), scaling, strict=True):
                if value is not None:
                    yield Problem(
                        key=key,
                        value=value,
                        why=f"loss scaling belongs to fp16; {self.mode} has float32's range of exponents, so "
                        "no gradient underflows for want of a scale",
                        fix='leave it out, or set mode = "fp16"',
                    )
        if self.mode != "bf16-pure" and self.rounding is not None:
            yield Problem(
                key="rounding",
                value=self.rounding,
                why=f"parameters are float32 under {self.mode}, so no update is lost to rounding",
                fix='leave it out, or set mode = "bf16-pure"',
            )

    def refuse(self, job: Job) -> Iterator[Problem]:
        if self.mode == "bf16-pure" and job.optimizer.implementation not in ("auto", "loop"):
            yield Problem(
                key="optimizer.implementation",
                value=job.optimizer.implementation,
                why="parameters stored in bfloat16 need rounding that torch's kernels do not do, so they are "
                "updated one by one",
                fix='implementation = "auto"',
            )
        if self.mode == "bf16-pure" and job.optimizer.name == "muon":
            yield Problem(
                key="optimizer.name",
                value="muon",
                why="Muon is torch's own and rounds a bfloat16 parameter to the nearest, so small updates are lost",
                fix='optimizer.name = "adamw", or precision = "bf16", which keeps parameters in float32',
            )

    def apply(self, session: Session) -> str:
        return self._apply(session) + _speed(self.arithmetic(), session)

    def _apply(self, session: Session) -> str:
        device = session.device.type
        arithmetic = self.arithmetic()
        if arithmetic is not None and arithmetic.computed is not None:
            # entered once per micro-batch: its cache of cast weights must not outlive an update
            session.compute = partial(torch.autocast, device, arithmetic.computed)
        if self.mode == "fp16":
            session.scaler = LossScaler(
                scale=self.initial_scale or 65536.0,
                growth_factor=2.0,
                backoff_factor=0.5,
                growth_interval=self.growth_interval or 2000,
                max_skipped_steps=self.max_skipped_steps or 25,
            )
            return f"float16 compute, float32 parameters, loss scale from {session.scaler.scale:g}"
        if self.mode == "bf16-pure":
            session.rounding = self.rounding or "stochastic"
            for parameter in session.model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
                if parameter.requires_grad:
                    # bfloat16 sums stop growing: 256 + 1 = 256
                    parameter.grad_dtype = torch.float32
            return f"bfloat16 parameters, float32 gradients and states, {session.rounding} updates"
        return "bfloat16 compute, float32 parameters" if self.mode == "bf16" else "float32 throughout"

    def claim(self) -> Claim:
        return Claim.BITWISE if self.mode == "fp32" else Claim.LOWER_PRECISION

    def arithmetic(self) -> Arithmetic | None:
        return ARITHMETIC.get(self.mode)


def _speed(arithmetic: Arithmetic | None, session: Session) -> str:
    """How fast matrix products of this precision are here beside float32's, measured: some devices emulate them."""
    if arithmetic is None or isinstance(next(session.model.parameters()), FakeTensor):
        return ""
    low = _product_s(arithmetic.computed or arithmetic.stored, session.device)
    ratio = _product_s(torch.float32, session.device) / low
    return f"; matrix products run {ratio:.2g} times as fast as in float32 here"


@cache  # once in a process: a run composes, rehearses and verifies, and float16 can be slow
def _product_s(dtype: torch.dtype, device: torch.device) -> float:
    size = 256 if device.type == "cpu" else 4096  # large enough to keep the device busy, small enough not to wait
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    times = [seconds(lambda: matrix @ matrix, device) for _ in range(4)]  # the first warms up
    return min(times[1:])
