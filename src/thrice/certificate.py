"""What a verification found: each compared quantity with its bound, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median

import torch

from thrice.runtime.technique import Claim

ALLOWED_FLOORS = 4.0
"""A deviation passes up to this many noise floors: the floor is one draw of the same rounding, and the largest
of some hundred draws stays within it; a missing factor or a lost term is off by thousands."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One compared quantity. Deviations are ‖got − expected‖ / ‖expected‖, in float64."""

    step: int
    kind: str
    """sample_ids, loss, gradient, grad_norm, parameter, or update: the parameter that the plain optimizer makes of
    the job's own gradients; or replica: whether a rank's parameters are rank 0's, which allows no deviation (its
    deviation is 1 where a bit differs, and `where` names the first such parameter)."""
    tensor: str = ""
    deviation: float
    floor: float = 0.0
    """The deviation that rounding alone brings about."""
    allowed: float = 0.0
    where: str
    """The element that is furthest off: its index, what was got and what was expected."""

    @property
    def ok(self) -> bool:
        return self.deviation <= self.allowed  # false for NaN, as it must be


@dataclass(frozen=True, kw_only=True)
class Certificate:
    claim: str
    steps: int
    samples: list[list[int]]
    """Which samples each verified step saw."""
    notes: list[str]
    job: str
    """The Job, as a file that reproduces it."""
    torch: str
    device: str
    processes: int
    rows: list[Row] = field(repr=False)

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def first_difference(self) -> Row | None:
        return next((row for row in self.rows if not row.ok), None)

    def as_dict(self) -> dict[str, object]:
        rows = [{**asdict(row), "ok": row.ok} for row in self.rows]
        first = next((row for row in rows if not row["ok"]), None)
        return {"ok": self.ok, **asdict(self), "first_difference": first, "rows": rows}


def judged(rows: Sequence[Row], promised: Claim, draws: Mapping[str, Sequence[float]]) -> list[Row]:
    """The rows with what each is allowed.

    A single number's floor can be small by luck, so a quantity is held to the larger of its own floor and what is
    common to its kind: for gradients and updates the median floor of the step; for parameters the largest of all
    steps, because AdamW turns a gradient near zero into a step of either sign, a lottery that any tensor can draw in
    any step; for the loss and the norm, of which each step has but one, the largest over all steps and the median of
    `draws`, the floors of their parts (the loss of each sample, the norm of each gradient). A float32 number is not
    known better than float32's spacing.
    """
    pools: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        pools.setdefault(_pool(row), []).append(row.floor)
    common = {pool: _common(pool[1], floors, draws) for pool, floors in pools.items()}
    return [replace(row, allowed=_allowed(row, common[_pool(row)], promised)) for row in rows]


def _pool(row: Row) -> tuple[int, str]:
    return (row.step if row.kind in ("gradient", "update") else 0, row.kind)


def _common(kind: str, floors: Sequence[float], draws: Mapping[str, Sequence[float]]) -> float:
    if kind == "gradient":
        return median(floors)
    if kind == "update":
        return max(median(floors), torch.finfo(torch.float32).eps)
    if kind == "parameter":
        return max(floors)
    return max(*floors, torch.finfo(torch.float32).eps, median(draws.get(kind) or [0.0]))


def _allowed(row: Row, common: float, promised: Claim) -> float:
    if promised is Claim.BITWISE or row.kind in ("sample_ids", "replica"):
        return 0.0
    return ALLOWED_FLOORS * max(row.floor, common)
