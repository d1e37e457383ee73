"""LARS: SGD with momentum and a learning rate for each tensor (You et al., arXiv:1708.03888, algorithm 1).

The rate is such that one update moves a tensor by about the same share of its norm in every layer, which keeps
SGD stable in very large batches.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from thrice.optim.share import Share
from thrice.optim.stored import Norms, Rounding, StateFormat, Stored
from thrice.optim.trust import norm, ratio, scaled


class Lars(Stored):
    """λ = trust_coefficient · ‖w‖ / (‖g‖ + weight_decay · ‖w‖); v ← momentum · v + lr · λ · (g + weight_decay · w);
    w ← w − v.

    The momentum is of updates, each scaled by the rate of its own step: a change of lr or λ does not rescale what
    was gathered before. Tensors of fewer than 2 dimensions have neither decay nor λ (it is 1), and λ is 1 where a
    norm is 0. `states`, `rounding`, `seed` and `share` as in `Stored`.
    """

    by_norms: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        *,
        states: StateFormat | None = None,
        rounding: Rounding | None = None,
        seed: int = 0,
        share: Share | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient,
        }  # fmt: skip
        super().__init__(params, defaults, states=states, rounding=rounding, seed=seed, share=share)

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(
        self,
        wide: Tensor,
        gradient: Tensor,
        moments: dict[str, Tensor],
        step: Tensor,
        group: dict[str, Any],
        norms: Norms | None = None,
    ) -> None:
        moved = gradient * group["lr"]
        if norms is not None or scaled(wide):
            decay = group["weight_decay"]
            weight_norm, gradient_norm = norms or (norm(wide), norm(gradient))
            # where the gradient is 0 the quotient is defined, but λ is 1 there too
            local = ratio(weight_norm * group["trust_coefficient"], gradient_norm + decay * weight_norm)
            local = local.where(gradient_norm > 0, 1.0)
            moved.add_(wide, alpha=group["lr"] * decay).mul_(local)
        if group["momentum"]:
            moved = moments["momentum_buffer"].mul_(group["momentum"]).add_(moved)
        wide.sub_(moved)

    def measured(
        self, wide: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: Tensor, group: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        return wide, gradient
