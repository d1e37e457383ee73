"""The training step, top to bottom, and evaluation.

One optimizer step is one global batch: its loss is Σ per-token loss / Σ tokens, both over every micro-batch of
the window, so that the result does not depend on how the batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thrice.data.batches import Batch
from thrice.errors import DataError, Diverged, Spoilt
from thrice.model.mode import evaluating
from thrice.runtime.session import Session, scalar


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one window came to."""

    taken: bool
    """False where the loss scaler skipped the step, or the window had no target."""
    loss: float | None
    """Mean over the window's targets, in nats; None where there are none."""
    grad_norm: float | None
    """Norm of the whole gradient before clipping: the one it was clipped with."""
    lr: float
    tokens: int
    """Targets of the window."""


def train_step(session: Session, window: Sequence[Batch]) -> StepResult:
    """Takes one optimizer step on a window of micro-batches, or leaves everything as it was.

    Raises Diverged where the loss or a gradient is not finite and no loss scale explains it, DataError where
    the input itself is not finite; nothing was updated then. Raises Spoilt where such a gradient was applied
    already (optimizer in backward).

    Every rank calls it with its own share of the window, as many micro-batches on each; what it returns, and whether
    it raises, is the same on all.
    """
    optimizer, scaler, progress = session.optimizer, session.scaler, session.progress
    lr = session.lr_at(progress.step, progress.samples)

    # the count of the whole window is known before its first backward
    count, samples = (
        int(total)
        for total in session.world.totals(
            sum(batch.count for batch in window), sum(len(batch.sample_ids) for batch in window)
        )
    )
    if count == 0:
        progress.skipped_steps += 1
        return StepResult(taken=False, loss=None, grad_norm=None, lr=lr, tokens=0)

    # forward and backward, all at one scale
    in_backward = session.in_backward
    if in_backward is not None:
        in_backward.lr = lr
    divisor = count if scaler is None else count / scaler.scale
    last = len(window) - 1
    losses = [_forward_backward(session, batch, divisor, last=i == last) for i, batch in enumerate(window)]
    loss = session.world.totals(scalar(torch.stack(losses).sum()))[0] / count

    # unscale once, then the norm, then clip with it
    parameters = [parameter for _, parameter in session.trained() if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if scaler is not None:
        scaler.unscale_(gradients)
    norm_tensor = in_backward.take_norm() if in_backward is not None else session.norm(gradients)
    norm = scalar(norm_tensor)

    # step or skip; a loss that is not finite can have a finite gradient, and no loss scale is to blame for it
    if not (math.isfinite(loss) and math.isfinite(norm)):
        optimizer.zero_grad(set_to_none=True)
        if scaler is None or not math.isfinite(loss):
            raise _not_finite(session, window, losses, norm)
        scaler.skipped()
        progress.skipped_steps += 1
        if scaler.skipped_in_row >= scaler.max_skipped_steps:
            raise Diverged(
                f"{scaler.skipped_in_row} steps in a row overflowed in float16 at step {progress.step + 1}; the "
                f"loss scale has fallen to {scaler.scale:g}\n"
                '  the gradients are not finite at any scale: lower lr, warm up longer, or use precision = "bf16"'
            )
        return StepResult(taken=False, loss=loss, grad_norm=norm, lr=lr, tokens=count)
    clip = session.job.optimizer.clip
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm_tensor)
    if in_backward is None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        session.updated()
    optimizer.zero_grad(set_to_none=True)
    if scaler is not None:
        scaler.stepped()

    # the schedule counts steps that were taken
    progress.step += 1
    progress.samples += samples
    progress.tokens += count
    return StepResult(taken=True, loss=loss, grad_norm=norm, lr=lr, tokens=count)


def _forward_backward(session: Session, batch: Batch, divisor: float, *, last: bool) -> Tensor:
    with session.micro_batch(last=last):
        loss_sum = session.watched_loss_sum(batch)
        # what is applied within backward cannot be taken back
        if session.in_backward is None or math.isfinite(scalar(loss_sum.detach())):
            torch.autograd.backward(loss_sum / divisor)
    return loss_sum.detach()


def _not_finite(session: Session, window: Sequence[Batch], losses: Sequence[Tensor], norm: float) -> Exception:
    """Names the samples behind a loss or gradient that is not finite, on whichever rank; nothing was updated."""
    step = session.progress.step + 1
    rows = [(sample, row) for batch in window for sample, row in zip(batch.sample_ids, batch.inputs, strict=False)]
    spoilt = _of_all(session, [sample for sample, row in rows if not bool(row.isfinite().all())])
    if spoilt:
        return DataError(
            f"the data of step {step} holds values that are not finite (samples {_listed(spoilt)}); nothing was "
            "updated\n  clean or drop those samples"
        )
    not_finite = [batch for batch, loss in zip(window, losses, strict=True) if not math.isfinite(scalar(loss))]
    bad = _of_all(session, [sample for batch in not_finite for sample in batch.sample_ids])
    what = "the loss" if bad else f"the gradient (norm {norm})"
    samples = _listed(bad or _of_all(session, [sample for batch in window for sample in batch.sample_ids]))
    if session.in_backward is not None and not bad:
        return Spoilt(
            f"{what} of step {step} is not finite (samples {samples}), and was applied within backward\n"
            "  the parameters are spoilt: go back to a checkpoint, and lower lr, warm up longer, or leave "
            "optimizer_in_backward out"
        )
    return Diverged(
        f"{what} of step {step} is not finite (samples {samples}); nothing was updated\n  lower lr or warm up longer"
    )


def _of_all(session: Session, samples: list[int]) -> list[int]:
    return [sample for of_rank in session.world.gather(samples) for sample in of_rank]


def _listed(samples: Sequence[int]) -> str:
    more = f" and {len(samples) - 8} more" if len(samples) > 8 else ""
    return ", ".join(map(str, samples[:8])) + more


@torch.no_grad()
def evaluate(session: Session, batches: Iterable[Batch]) -> tuple[float, int]:
    """(mean loss in nats, targets) over the batches of all ranks, each counted once; the model's mode comes back.

    Every rank calls it with its own batches, however many; what it returns is the same on all.
    """
    total, count = 0.0, 0
    with evaluating(session.model):
        for batch in batches:
            total += scalar(session.loss_sum(batch))
            count += batch.count
    total, whole = session.world.totals(total, count)
    return (total / whole if whole else math.nan), int(whole)
