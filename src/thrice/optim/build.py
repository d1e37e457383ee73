"""The optimizer of a job, on parameters whose storage is final."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from thrice.errors import ConfigError, Problem
from thrice.optim.stored import RoundedAdamW, RoundedSGD, Rounding
from thrice.spec.job import Optimizer as OptimizerSpec

FUSED_DEVICES = ("cpu", "cuda")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices decay; biases, norms and other vectors do not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module, spec: OptimizerSpec, *, lr: float, seed: int, rounding: Rounding | None = None
) -> torch.optim.Optimizer:
    """torch's own optimizer, or ours where parameters are stored in bfloat16 and `rounding` says how.

    `seed` is stochastic rounding's. Raises ConfigError where no parameter is trainable.
    """
    groups = parameter_groups(model, spec.weight_decay)
    if not groups:
        raise ConfigError(
            [
                Problem(
                    key="model",
                    value=type(model).__name__,
                    why="none of its parameters requires a gradient, so there is nothing to train",
                    fix="requires_grad_(True) on what is to be trained",
                )
            ]
        )
    if rounding is not None:
        if spec.name == "adamw":
            return RoundedAdamW(groups, lr=lr, betas=spec.betas, eps=spec.eps, rounding=rounding, seed=seed)
        return RoundedSGD(
            groups, lr=lr, momentum=0.9 if spec.momentum is None else spec.momentum, rounding=rounding, seed=seed
        )
    device = groups[0]["params"][0].device.type
    implementation = spec.implementation
    if implementation == "auto":
        implementation = "fused" if device in FUSED_DEVICES else "foreach"
    kernel = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    if spec.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=spec.betas, eps=spec.eps, **kernel)
    return torch.optim.SGD(groups, lr=lr, momentum=0.9 if spec.momentum is None else spec.momentum, **kernel)
