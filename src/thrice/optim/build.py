"""The optimizer of a job, on parameters whose storage is final."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thrice.errors import ConfigError, Problem
from thrice.model.anatomy import blocks
from thrice.optim.composite import Composite
from thrice.optim.lamb import Lamb
from thrice.optim.lars import Lars
from thrice.optim.share import Share
from thrice.optim.stored import Rounding, StateFormat, StoredAdamW, StoredSGD
from thrice.spec.job import Optimizer as OptimizerSpec

FUSED_DEVICES = ("cpu", "cuda")

Group = dict[str, Any]


def parameter_groups(model: nn.Module, weight_decay: float, share: Share | None = None) -> list[Group]:
    """Two groups of (name, parameter): matrices decay; biases, norms and other vectors do not.

    With `share` its pieces stand for their parameters.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    matrices = {name for name, parameter in trainable.items() if parameter.ndim >= 2}
    updated = trainable if share is None else share.named()
    groups = [
        {"params": [(n, p) for n, p in updated.items() if n in matrices], "weight_decay": weight_decay},
        {"params": [(n, p) for n, p in updated.items() if n not in matrices], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module,
    spec: OptimizerSpec,
    *,
    lr: float,
    seed: int,
    rounding: Rounding | None = None,
    states: StateFormat | None = None,
    in_backward: bool = False,
    share: Share | None = None,
) -> Optimizer:
    """torch's own optimizer where it has one, or ours where parameters or states are kept in fewer bits.

    `rounding` says how bfloat16 parameters are written back, `states` how states are stored; `seed` is stochastic
    rounding's. With `in_backward` it is a Composite of one part for each trainable parameter, with `share` it updates
    pieces of parameters, which Muon cannot. Raises ConfigError where no parameter is trainable, and where Muon finds
    no matrix or is to store in fewer bits.
    """
    groups = parameter_groups(model, spec.weight_decay, share)
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
    parts: list[tuple[Callable[[list[Group]], Optimizer], list[Group]]]
    if spec.name == "muon":
        assert share is None, "what orthogonalises a matrix needs all of it"
        if rounding is not None or states is not None:
            raise ConfigError([_muon_stores_in_float32(rounding, states)])
        inside, outside = _split(model, groups)
        kernel = _kernel(spec, groups)
        parts = [
            (partial(_muon, spec=spec, lr=lr), inside),
            (partial(_adamw, spec=spec, lr=lr, kernel=kernel), outside),
        ]
    elif spec.name in ("adamw", "sgd") and rounding is None and states is None:
        make = _adamw if spec.name == "adamw" else _sgd
        parts = [(partial(make, spec=spec, lr=lr, kernel=_kernel(spec, groups)), groups)]
    else:
        parts = [(partial(_stored, spec=spec, lr=lr, states=states, rounding=rounding, seed=seed, share=share), groups)]
    if in_backward:
        parts = [
            (make, [{**group, "params": [named]}]) for make, of in parts for group in of for named in group["params"]
        ]
    optimizers = [make(of) for make, of in parts if of]
    return optimizers[0] if len(optimizers) == 1 and not in_backward else Composite(optimizers)


def _kernel(spec: OptimizerSpec, groups: list[Group]) -> dict[str, bool]:
    """Which of torch's implementations; "auto" is the fused one where the device has it."""
    device = groups[0]["params"][0][1].device.type
    implementation = spec.implementation
    if implementation == "auto":
        implementation = "fused" if device in FUSED_DEVICES else "foreach"
    return {"fused": implementation == "fused", "foreach": implementation == "foreach"}


def _adamw(groups: list[Group], *, spec: OptimizerSpec, lr: float, kernel: dict[str, bool]) -> Optimizer:
    return torch.optim.AdamW(groups, lr=lr, betas=spec.betas, eps=spec.eps, **kernel)


def _sgd(groups: list[Group], *, spec: OptimizerSpec, lr: float, kernel: dict[str, bool]) -> Optimizer:
    return torch.optim.SGD(groups, lr=lr, momentum=_momentum(spec), **kernel)


def _muon(groups: list[Group], *, spec: OptimizerSpec, lr: float) -> Optimizer:
    # an update of AdamW's size, so that one learning rate serves both (arXiv:2502.16982 §2.2)
    momentum = 0.95 if spec.momentum is None else spec.momentum
    return torch.optim.Muon(groups, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")


def _stored(
    groups: list[Group],
    *,
    spec: OptimizerSpec,
    lr: float,
    states: StateFormat | None,
    rounding: Rounding | None,
    seed: int,
    share: Share | None,
) -> Optimizer:
    how: dict[str, Any] = {"lr": lr, "states": states, "rounding": rounding, "seed": seed, "share": share}
    if spec.name in ("adamw", "lamb"):
        kind = StoredAdamW if spec.name == "adamw" else Lamb
        return kind(groups, betas=spec.betas, eps=spec.eps, **how)
    if spec.name == "sgd":
        return StoredSGD(groups, momentum=_momentum(spec), **how)
    trust_coefficient = 0.001 if spec.trust_coefficient is None else spec.trust_coefficient
    return Lars(groups, momentum=_momentum(spec), trust_coefficient=trust_coefficient, **how)


def _momentum(spec: OptimizerSpec) -> float:
    return 0.9 if spec.momentum is None else spec.momentum


def _split(model: nn.Module, groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """(groups of the matrices in the repeated blocks, groups of all else), of the same settings."""
    within = {parameter for block in blocks(model) for parameter in block.module.parameters() if parameter.ndim == 2}
    inside, outside = (
        [
            {**group, "params": chosen}
            for group in groups
            if (chosen := [(name, p) for name, p in group["params"] if (p in within) is wanted])
        ]
        for wanted in (True, False)
    )
    if not inside:
        raise ConfigError(
            [
                Problem(
                    key="optimizer.name",
                    value="muon",
                    why=f"it is for matrices in repeated blocks, and {type(model).__name__} has none to train there",
                    fix='optimizer.name = "adamw"',
                )
            ]
        )
    return inside, outside


def _muon_stores_in_float32(rounding: Rounding | None, states: StateFormat | None) -> Problem:
    what = f"states in {states}" if rounding is None else f"bfloat16 parameters with {rounding} updates"
    return Problem(
        key="optimizer.name",
        value="muon",
        why=f"Muon is torch's own, on float32 parameters with float32 states; it has no {what}",
        fix='optimizer.name = "adamw"',
    )
