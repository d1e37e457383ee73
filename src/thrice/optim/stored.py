"""Optimizers for parameters stored in bfloat16, whose 8 bits plain rounding would freeze.

A weight at 1.0 has neighbours 2⁻⁸ below and 2⁻⁷ above: an update of 6e-4 rounds to nothing, every time. So
each parameter is widened to float32, updated by torch's own arithmetic, and written back either with
*stochastic* rounding (right on average; no memory) or *compensated* (Kahan: what was lost is kept in a second
bfloat16 and added the next time). States are float32; the float32 copies live one parameter at a time.
See arXiv:2010.06192 for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer
from torch.optim.sgd import sgd

from thrice.spec.seed import key

Rounding = Literal["stochastic", "compensated"]
StateFormat = Literal["bf16", "8bit"]


def round_stochastically(x: Tensor, generator: Generator) -> Tensor:
    """float32 to bfloat16, up with the probability of the part that is cut off: the expectation is `x`."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    bits = x.contiguous().view(torch.int32) + noise  # carries into the kept bits with that probability
    return bits.bitwise_and_(-1 << 16).view(torch.float32).to(torch.bfloat16)


class _Rounded(Optimizer):
    """Widens, updates and rounds one parameter after the other; a subclass says how one is updated."""

    def __init__(self, groups: Any, defaults: dict[str, Any], *, rounding: Rounding, seed: int) -> None:
        super().__init__(groups, {**defaults, "taken": 0})
        self.rounding = rounding
        self.seed = seed

    def update(self, wide: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient (any float dtype, widened to float32)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        index = 0
        for group in self.param_groups:
            group["taken"] += 1
            for parameter in group["params"]:
                index += 1
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad.float(), group, index)
        return loss

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[parameter]
        if self.rounding == "compensated" and "compensation" not in state:
            state["compensation"] = torch.zeros_like(parameter)
        wide = parameter.float()
        if self.rounding == "compensated":
            wide += state["compensation"]
        self.update(wide, gradient, state, group)
        if self.rounding == "compensated":
            parameter.copy_(wide)
            state["compensation"].copy_(wide.sub_(parameter))
            return
        # keyed by parameter and step: resumable with no state, and the global generator is left alone
        generator = Generator(device=wide.device).manual_seed(key(self.seed, index, group["taken"]))
        parameter.copy_(round_stochastically(wide, generator))


class RoundedAdamW(_Rounded):
    """torch.optim.AdamW on bfloat16 parameters."""

    def __init__(
        self,
        groups: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        rounding: Rounding,
        seed: int,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults, rounding=rounding, seed=seed)

    def update(self, wide: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(wide)
            state["exp_avg_sq"] = torch.zeros_like(wide)
            state["step"] = torch.zeros((), device=wide.device)
        beta1, beta2 = group["betas"]
        adamw(
            [wide], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
            foreach=False, fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip


class RoundedSGD(_Rounded):
    """torch.optim.SGD on bfloat16 parameters."""

    def __init__(
        self,
        groups: Any,
        *,
        lr: float,
        momentum: float,
        weight_decay: float = 0.0,
        rounding: Rounding,
        seed: int,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(groups, defaults, rounding=rounding, seed=seed)

    def update(self, wide: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        momentum = [state.get("momentum_buffer") if group["momentum"] else None]
        sgd(
            [wide], [gradient], momentum, foreach=False, weight_decay=group["weight_decay"],
            momentum=group["momentum"], lr=group["lr"], dampening=0.0, nesterov=False, maximize=False,
        )  # fmt: skip
        if momentum[0] is not None:
            state["momentum_buffer"] = momentum[0]
