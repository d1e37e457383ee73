"""Recomputation (gradient checkpointing, arXiv:1604.06174): activations are dropped and computed again.

The same loss and gradients to the last bit, dropout included, for less memory and more FLOPs. It patches the
`forward` of the blocks it serves, which leaves every parameter's name as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Self, final

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from thrice.errors import ConfigError, Infeasible, Problem
from thrice.model import flash
from thrice.model.anatomy import Block, blocks
from thrice.observe.trace import Tracer
from thrice.runtime.fakes import faked
from thrice.runtime.session import Session
from thrice.runtime.technique import Claim, Slot, Stage
from thrice.spec.job import Job, at_least

Mode = Literal["none", "selective", "attention_only", "full"]
"""What one block drops: nothing; all but the outputs of matrix products and attention; its attention's inner
activations; everything but its input."""

MODES: tuple[Mode, ...] = ("none", "selective", "attention_only", "full")

aten = torch.ops.aten
KEPT = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        flash.OPERATOR,
    }
)
"""What `selective` keeps: dear to compute, and small beside what lies between."""


@final
@dataclass(frozen=True, kw_only=True)
class Recompute:
    name: ClassVar[str] = "recompute"
    stage: ClassVar[Stage] = Stage.BLOCKS
    slot: ClassVar[Slot] = Slot.RECOMPUTE

    strategy: Literal["none", "full", "every_k", "boundary", "attention_only", "selective", "budget"] = "none"
    """`full`: every block. `every_k`: each k-th block. `boundary`: the first, the middle and the last block.
    `attention_only`: the attention of every block. `selective`: every block, keeping the outputs of matrix
    products and attention. `budget`: whatever costs the fewest FLOPs within `budget_bytes`."""
    k: int | None = None
    """every_k: one block in k is recomputed, from the first; 2 where not given."""
    budget_bytes: int | None = None
    """budget: bytes that one micro-batch's blocks may hold for backward."""

    @classmethod
    def examples(cls) -> Iterable[Self]:
        yield cls(strategy="none")
        yield cls(strategy="full")
        yield cls(strategy="every_k", k=2)
        yield cls(strategy="boundary")
        yield cls(strategy="attention_only")
        yield cls(strategy="selective")
        yield cls(strategy="budget", budget_bytes=1 << 20)

    def check(self) -> Iterator[Problem]:
        yield from at_least(1, k=self.k, budget_bytes=self.budget_bytes)
        for key, value, strategy in (("k", self.k, "every_k"), ("budget_bytes", self.budget_bytes, "budget")):
            if value is not None and self.strategy != strategy:
                yield Problem(
                    key=key,
                    value=value,
                    why=f'it belongs to strategy = "{strategy}", and the strategy is "{self.strategy}"',
                    fix=f'leave it out, or set strategy = "{strategy}"',
                )
        if self.strategy == "budget" and self.budget_bytes is None:
            yield Problem(
                key="budget_bytes",
                why="the strategy is budget, and no budget is given",
                fix='for example "512MiB"',
            )

    def refuse(self, job: Job) -> Iterator[Problem]:
        return iter(())

    def apply(self, session: Session) -> str:
        if self.strategy == "none":
            return "every activation is kept"
        parts = blocks(session.model)
        config: Any = getattr(session.model, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # Hugging Face's key/value cache would grow again in recomputation
        modes = self._modes(session, parts)
        for block, mode in zip(parts, modes, strict=True):
            patch(block, mode)
        return ", ".join(
            f"{count} of {len(parts)} blocks {mode}"
            for mode in ("full", "attention_only", "selective", "none")
            if (count := modes.count(mode))
        )

    def claim(self) -> Claim:
        return Claim.BITWISE

    def arithmetic(self) -> None:
        return None

    def _modes(self, session: Session, parts: Sequence[Block]) -> list[Mode]:
        count = len(parts)
        match self.strategy:
            case "every_k":
                k = self.k or 2
                return ["full" if index % k == 0 else "none" for index in range(count)]
            case "boundary":
                recomputed = {0, count // 2, count - 1}
                return ["full" if index in recomputed else "none" for index in range(count)]
            case "attention_only" | "selective" | "full" | "none" as mode:
                return [mode] * count
            case "budget":
                assert self.budget_bytes is not None, "checked"
                return choose([costs(session, mode) for mode in MODES], self.budget_bytes)


def patch(block: Block, mode: Mode) -> None:
    """Makes the block's forward drop what `mode` says and compute it again in backward."""
    match mode:
        case "none":
            return
        case "full":
            _recompute(block.module)
        case "selective":
            _recompute(block.module, partial(create_selective_checkpoint_contexts, _keep))
        case "attention_only":
            if block.attention is None:
                raise ConfigError(
                    [
                        Problem(
                            key="recompute.strategy",
                            value="attention_only",
                            why=f"no attention was found in block {block.name} ({type(block.module).__name__})",
                            fix='strategy = "full" or "selective"',
                        )
                    ]
                )
            _recompute(block.attention)


def _keep(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute(module: nn.Module, context_fn: Callable[[], Any] | None = None) -> None:
    forward = module.forward
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # evaluation: nothing is kept, so nothing is to be dropped
            return forward(*args, **kwargs)
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, **options)

    module.forward = recomputed


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one block costs under a mode, for one micro-batch."""

    held_bytes: int
    """What it has allocated in forward and still holds when its forward ends, its output included."""
    recomputed_flops: int


def costs(session: Session, mode: Mode) -> list[Cost | None]:
    """Each block's cost under `mode`, from the trace of a forward and backward on fake tensors.

    None for a block that has no such mode. Nothing is computed, and the session's model is as it was.
    """
    model = session.model
    with faked(model):
        parts, batch = blocks(model), session.example()
        if mode == "attention_only" and not all(block.attention for block in parts):
            return [None] * len(parts)
        tracer = Tracer(model)
        held, flops = [0] * len(parts), [0] * len(parts)
        for index, block in enumerate(parts):
            # below the patch: runs in forward and again in recomputation; above it: in forward alone
            _watched(block.attention if mode == "attention_only" else block.module, tracer, flops, index)
            patch(block, mode)
            _watched(block.module, tracer, held, index, read=Tracer.live_bytes)
        with tracer:
            loss = session.loss_sum(batch)
            forward_flops = list(flops)
            torch.autograd.backward(loss)
    return [
        Cost(held_bytes=held_bytes, recomputed_flops=both - once)
        for held_bytes, both, once in zip(held, flops, forward_flops, strict=True)
    ]


def _watched(
    module: nn.Module | None,
    tracer: Tracer,
    totals: list[int],
    index: int,
    read: Callable[[Tracer], int] = lambda tracer: tracer.flops,
) -> None:
    """Adds to `totals[index]` how far `read` moves in each call of the module's forward."""
    assert module is not None
    forward = module.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        before = read(tracer)
        try:
            return forward(*args, **kwargs)
        finally:  # recomputation ends early, by an exception, once it has what backward needs
            totals[index] += read(tracer) - before

    module.forward = watched


def choose(by_mode: Sequence[Sequence[Cost | None]], budget_bytes: int) -> list[Mode]:
    """A mode for each block, so that together they hold at most `budget_bytes`.

    From nothing dropped, it takes the change that saves the most bytes per recomputed FLOP until the budget is
    kept (the greedy solution of a multiple-choice knapsack, which is off by less than one block's change).
    Raises Infeasible with the least that is possible where the budget is below it.
    """
    options = [dict(zip(MODES, per_block, strict=True)) for per_block in zip(*by_mode, strict=True)]
    known = [{mode: cost for mode, cost in block.items() if cost is not None} for block in options]
    least = sum(min(cost.held_bytes for cost in block.values()) for block in known)
    if least > budget_bytes:
        raise Infeasible(
            f"recompute.budget_bytes = {budget_bytes:,}: the blocks hold at least {least:,} bytes of one micro-batch, "
            f"with everything recomputed\n    → budget_bytes = {least}, or a smaller micro_batch"
        )
    chosen: list[Mode] = ["none"] * len(known)
    while sum(block[mode].held_bytes for block, mode in zip(known, chosen, strict=True)) > budget_bytes:
        _, index, mode = max(
            (_saved_per_flop(block[chosen[index]], cost), -index, mode)
            for index, block in enumerate(known)
            for mode, cost in block.items()
            if cost.held_bytes < block[chosen[index]].held_bytes
        )
        chosen[-index] = mode
    return chosen


def _saved_per_flop(now: Cost, then: Cost) -> float:
    more_flops = then.recomputed_flops - now.recomputed_flops
    return (now.held_bytes - then.held_bytes) / more_flops if more_flops > 0 else math.inf
