"""The contract of a technique: a frozen keyword-only dataclass that declares, refuses, applies and claims.

Its fields are its config (validated alone by `check`); the first is its short form in a file. `stage` says
when it applies, `slot` what it owns alone. It reads from the session what earlier stages wrote, never another
technique's class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

import torch

from thrice.errors import Problem
from thrice.optim.stored import StateFormat
from thrice.spec.job import Job

if TYPE_CHECKING:
    from thrice.runtime.session import Session


class Claim(IntEnum):
    """Which equality with the plain single-process fp32 loop is promised; a plan's is its weakest part's."""

    BITWISE = 0
    """The same bits."""
    ROUNDING = 1
    """Equal but for the order of fp32 sums."""
    LOWER_PRECISION = 2
    """Equal but for the rounding of the precision that was asked for."""
    CHANGES_MATHEMATICS = 3
    """Another algorithm, knowingly."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """A low precision, in plain torch's terms: what LOWER_PRECISION allows is what this loses by itself."""

    stored: torch.dtype = torch.float32
    """Of the parameters."""
    computed: torch.dtype | None = None
    """Autocast's dtype; None where compute is in the parameters' own."""
    states: StateFormat | None = None
    """Of the optimizer's states between updates; None is float32."""
    reduced: torch.dtype | None = None
    """Of gradients on their way between ranks; None is their own."""


class Stage(IntEnum):
    """The order in which techniques apply; each place has its reason."""

    NUMERICS = 10
    """First: how parameters are stored and computed with decides how many bytes everything later handles."""
    LAYERS = 15
    """Layers are exchanged for others that compute the same: what wraps whole blocks has to find them in place."""
    BLOCKS = 20
    """What wraps the forward of blocks; it may measure them, under the numerics and layers set before."""
    SHARD = 22
    """Parameters are final and every gradient's path is set; what divides replicas makes them, and so comes first."""
    REPLICATE = 23
    """Plain replicas, where nothing has made any: what watches a backward sees all of it."""
    COMPILE = 25
    """Around everything that a block does, recomputation included, so that it is one graph."""
    OPTIMIZER = 30
    """Last: parameters have their final storage, so states can be built on them."""


class Slot(StrEnum):
    """A resource that one technique owns; two that name the same one cannot be combined."""

    NUMERICS = "numerics"
    ATTENTION = "attention"
    HEAD = "head"
    NORMS = "norms"
    RECOMPUTE = "recompute"
    COMPILE = "compile"
    REPLICATE = "replicate"
    SHARD = "shard"
    STATES = "states"
    UPDATE = "update"


class Technique(Protocol):
    """What every technique offers. Implementations are final dataclasses, with no common base."""

    name: ClassVar[str]
    """Its key in a file."""
    stage: ClassVar[Stage]
    slot: ClassVar[Slot]

    @classmethod
    def examples(cls) -> Iterable[Self]:
        """Settings worth proving, each way it works at least once; the contract suite takes every pair."""
        ...

    def check(self) -> Iterator[Problem]:
        """What is wrong with the settings by themselves; keys are relative to the technique's table."""
        ...

    def refuse(self, job: Job) -> Iterator[Problem]:
        """Why it cannot serve this job, each reason with its numbers and the fix."""
        ...

    def apply(self, session: Session) -> str:
        """Fill the session's slots; returns one line that says what was done, for the record."""
        ...

    def claim(self) -> Claim: ...

    def arithmetic(self) -> Arithmetic | None:
        """The precision whose rounding a claim of LOWER_PRECISION allows; None for every other claim."""
        ...
