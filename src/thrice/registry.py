"""Every technique, one line each. The loader, `compose` and the contract suite go by this table."""

from __future__ import annotations

from thrice.runtime.technique import Technique
from thrice.techniques.optimizer_states import OptimizerStates
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import Recompute

TECHNIQUES: dict[str, type[Technique]] = {
    Precision.name: Precision,
    Recompute.name: Recompute,
    OptimizerStates.name: OptimizerStates,
}
