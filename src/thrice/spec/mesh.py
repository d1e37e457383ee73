"""How processes are arranged: `processes = pipeline × data × context × tensor`, and where in it a rank stands.

The order is that of the messages: ranks next to each other, which share a machine first, are those of one tensor
group, who speak most; stages of a pipeline are furthest apart. No degree is below 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thrice.errors import Problem

AXES = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")
"""From the slowest to the fastest as ranks are counted."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    data_parallel: int = 1
    """Replicas that see different data."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Degrees in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def processes(self) -> int:
        size = 1
        for degree in self.shape:
            size *= degree
        return size

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> where the rank stands on it. Raises IndexError outside range(processes)."""
        if not 0 <= rank < self.processes:
            raise IndexError(f"rank {rank} of {self.processes} processes")
        where = {}
        for axis, degree in zip(reversed(AXES), reversed(self.shape), strict=True):
            rank, where[axis] = divmod(rank, degree)
        return where

    def rank(self, **where: int) -> int:
        """The rank at those coordinates; an axis that is not given is at 0."""
        rank = 0
        for axis, degree in zip(AXES, self.shape, strict=True):
            rank = rank * degree + where.get(axis, 0)
        return rank

    def group(self, axis: str, rank: int) -> list[int]:
        """The ranks that differ from `rank` on `axis` alone, itself included, in the order of that axis."""
        here = self.coordinates(rank)
        return [self.rank(**{**here, axis: place}) for place in range(getattr(self, axis))]

    def __str__(self) -> str:
        return " × ".join(f"{axis} {degree}" for axis, degree in zip(AXES, self.shape, strict=True) if degree > 1)


def mesh_of(
    processes: int,
    *,
    data_parallel: int | Literal["auto"] = "auto",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
) -> Mesh | Problem:
    """The mesh of `processes`, or why there is none; `data_parallel` "auto" is what the others leave."""
    others = tensor_parallel * pipeline_parallel * context_parallel
    product = (
        f"tensor_parallel {tensor_parallel} × pipeline_parallel {pipeline_parallel} "
        f"× context_parallel {context_parallel}"
    )
    if processes % others:
        above = -(-processes // others) * others
        return Problem(
            key="processes",
            value=processes,
            why=f"{product} = {others} does not divide it",
            fix=f"processes = {above}" + (f" or {above - others}" if above > others else ""),
        )
    left = processes // others
    if data_parallel not in ("auto", left):
        return Problem(
            key="data_parallel",
            value=data_parallel,
            why=f"{processes} processes / ({product}) leave {left} for it",
            fix=f'data_parallel = "auto", or processes = {others * data_parallel}',
        )
    return Mesh(
        data_parallel=left,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        context_parallel=context_parallel,
    )
