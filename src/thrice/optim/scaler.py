"""Dynamic loss scaling for float16 (Micikevicius et al., arXiv:1710.03740 §3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True)
class LossScaler:
    """A power of two that keeps small gradients above float16's smallest number.

    One scale holds for a whole window: scale, every backward, unscale once, then clip, then step or skip.
    """

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    """Good steps in a row before the scale grows."""
    max_skipped_steps: int
    good_steps: int = 0
    """Good steps since the scale last changed."""
    skipped_in_row: int = 0

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Divides the gradients by the scale, in place."""
        if gradients:
            torch._foreach_mul_(list(gradients), 1.0 / self.scale)

    def stepped(self) -> None:
        """The gradients were finite and the step was taken."""
        self.skipped_in_row = 0
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= self.growth_factor
            self.good_steps = 0

    def skipped(self) -> None:
        """A gradient overflowed: nothing moved but the scale."""
        self.scale *= self.backoff_factor
        self.good_steps = 0
        self.skipped_in_row += 1

    def state_dict(self) -> dict[str, float]:
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "skipped_in_row": self.skipped_in_row,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.skipped_in_row = int(state["skipped_in_row"])
