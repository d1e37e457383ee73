"""Optimizer states in fewer bits: bfloat16, or 8 bits by block (arXiv:2110.02861).

States are stored in the low precision between updates and widened to float32 for each, one parameter at a time.
AdamW's two take 8 bytes a parameter in float32, 4 in bfloat16 and 2.03 in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, final

from torch import Tensor

from thrice.errors import ConfigError, Problem
from thrice.optim.stored import LEAST_ELEMENTS, StateFormat, stored_bytes, stored_format
from thrice.runtime.session import Session
from thrice.runtime.technique import Arithmetic, Claim, Slot, Stage
from thrice.spec.job import Job
from thrice.spec.job import Optimizer as OptimizerSpec

STATES = {"adamw": 2, "lamb": 2, "sgd": 1, "lars": 1}
"""How many states a parameter has."""

SLOWEST_DECAY = 2.0**-8
"""A bfloat16 has 8 significant bits: what loses less than this share of itself in a step may round back to what it
was, every time, and then it never falls."""


@final
@dataclass(frozen=True, kw_only=True)
class OptimizerStates:
    name: ClassVar[str] = "optimizer_states"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    slot: ClassVar[Slot] = Slot.STATES

    format: Literal["fp32", "bf16", "8bit"] = "fp32"
    """`8bit`: matrices of at least 4,096 elements in 8 bits, by blocks of 256; what is smaller stays in float32."""

    @classmethod
    def examples(cls) -> Iterable[Self]:
        yield cls(format="fp32")
        yield cls(format="bf16")
        yield cls(format="8bit")

    def check(self) -> Iterator[Problem]:
        return iter(())

    @property
    def _states(self) -> StateFormat | None:
        return None if self.format == "fp32" else self.format

    def refuse(self, job: Job) -> Iterator[Problem]:
        optimizer = job.optimizer
        if self.format == "fp32":
            return
        if optimizer.name == "muon":
            yield Problem(
                key=self.name,
                value=self.format,
                why="Muon is torch's own and keeps its one state in float32, half of what AdamW keeps",
                fix='leave it out, or optimizer.name = "adamw"',
            )
        if optimizer.name in ("sgd", "lars") and optimizer.momentum == 0:
            yield Problem(
                key=self.name,
                value=self.format,
                why=f"{optimizer.name} with momentum = 0 has no state to store",
                fix="leave it out, or optimizer.momentum = 0.9",
            )
        if optimizer.implementation in ("fused", "foreach"):
            yield Problem(
                key="optimizer.implementation",
                value=optimizer.implementation,
                why=f"torch's kernels keep states in float32; in {self.format} parameters are updated one by one",
                fix='implementation = "auto"',
            )
        if self.format == "bf16":
            yield from _too_slow(optimizer)

    def apply(self, session: Session) -> str:
        if self._states is None:
            return "float32 states"
        session.states = self._states
        tensors = [parameter for parameter in session.model.parameters() if parameter.requires_grad]
        each = STATES[session.job.optimizer.name]
        now, wide = (each * sum(stored_bytes(tensor, kept) for tensor in tensors) for kept in (self._states, None))
        size = f"{_mebibytes(now)} of states, {_mebibytes(wide)} in float32"
        if self.format == "bf16":
            return f"every state in bfloat16: {size}"
        small = [tensor for tensor in tensors if stored_format(tensor, "8bit") == "8bit"]
        if tensors and not small:
            raise ConfigError([self._nothing_qualifies(tensors)])
        share = sum(tensor.numel() for tensor in small) / max(1, sum(tensor.numel() for tensor in tensors))
        return f"{len(small)} of {len(tensors)} tensors ({share:.1%} of the elements) in 8 bits: {size}"

    def _nothing_qualifies(self, tensors: Sequence[Tensor]) -> Problem:
        matrices = [tensor.numel() for tensor in tensors if tensor.ndim >= 2]
        largest = f"the largest matrix has {max(matrices):,} elements" if matrices else "there is no matrix"
        return Problem(
            key=self.name,
            value=self.format,
            why=f"8 bits are for matrices of at least {LEAST_ELEMENTS:,} elements, and of the model's {len(tensors)} "
            f"tensors none is one: {largest}",
            fix=f'{self.name} = "bf16", or leave it out',
        )

    def claim(self) -> Claim:
        return Claim.BITWISE if self._states is None else Claim.LOWER_PRECISION

    def arithmetic(self) -> Arithmetic | None:
        return None if self._states is None else Arithmetic(states=self._states)


def _too_slow(optimizer: OptimizerSpec) -> Iterator[Problem]:
    """A problem for each decay rate so near 1 that a bfloat16 state could not fall."""
    adaptive = optimizer.name in ("adamw", "lamb")
    rates = optimizer.betas if adaptive else (0.9 if optimizer.momentum is None else optimizer.momentum,)
    for rate in rates:
        if rate > 1 - SLOWEST_DECAY:
            yield Problem(
                key="optimizer.betas" if adaptive else "optimizer.momentum",
                value=list(rates) if adaptive else rate,
                why=f"a state that decays by {1 - rate:.2g} of itself a step rounds back to what it was, every time: "
                f"neighbours in bfloat16 are up to {2.0**-7:.2g} apart, so it could rise but never fall",
                fix='optimizer_states = "8bit", whose scales are float32, or '
                + ("betas = [0.9, 0.95]" if adaptive else "momentum = 0.9"),
            )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.3g} MiB"
