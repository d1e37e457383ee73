"""LAMB: AdamW's update, as long as the weight it moves (You et al., arXiv:1904.00962, algorithm 2).

In very large batches few steps are left, so they have to be long, and a learning rate that suits one layer
throws another off. LAMB gives each tensor an update of the norm lr · ‖weight‖, whatever its gradient's scale.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from thrice.optim.share import Share
from thrice.optim.stored import Norms, Rounding, StateFormat, Stored
from thrice.optim.trust import norm, ratio, scaled


class Lamb(Stored):
    """m and v as in Adam, both with bias correction; u = m̂ / (√v̂ + eps) + weight_decay · w;
    w ← w − lr · ‖w‖/‖u‖ · u.

    φ is the identity: no norm is clipped. Tensors of fewer than 2 dimensions have neither decay nor trust ratio,
    and the ratio is 1 where a norm is 0. `states`, `rounding`, `seed` and `share` as in `Stored`.
    """

    by_norms: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        states: StateFormat | None = None,
        rounding: Rounding | None = None,
        seed: int = 0,
        share: Share | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, states=states, rounding=rounding, seed=seed, share=share)

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def update(
        self,
        wide: Tensor,
        gradient: Tensor,
        moments: dict[str, Tensor],
        step: Tensor,
        group: dict[str, Any],
        norms: Norms | None = None,
    ) -> None:
        is_scaled = norms is not None or scaled(wide)
        update = self._direction(wide, gradient, moments, step, group, decays=is_scaled)
        if is_scaled:
            update.mul_(ratio(*(norms or (norm(wide), norm(update)))))
        wide.sub_(update, alpha=group["lr"])

    def measured(
        self, wide: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: Tensor, group: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        return wide, self._direction(wide, gradient, moments, step, group, decays=True)

    def _direction(
        self,
        wide: Tensor,
        gradient: Tensor,
        moments: dict[str, Tensor],
        step: Tensor,
        group: dict[str, Any],
        *,
        decays: bool,
    ) -> Tensor:
        """u; the moments are brought up to it."""
        beta1, beta2 = group["betas"]
        moments["exp_avg"].lerp_(gradient, 1 - beta1)
        moments["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # the count in double: in float32, 1 − 0.999^1 is off by 3e-5
        count = step.double()
        denominator = (moments["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
        update: Tensor = (moments["exp_avg"] / (1 - beta1**count)).div_(denominator)
        if decays:
            update.add_(wide, alpha=group["weight_decay"])
        return update
