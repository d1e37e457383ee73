"""The plain loop that a job is held against: one process, the whole global batch at once, no technique.

It shares the model, the optimizer's formulas and the learning rate's with the job, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from thrice.compose import build_model
from thrice.data.batches import IGNORE, Batch, Position, order
from thrice.optim.build import build_optimizer
from thrice.optim.schedules import learning_rate
from thrice.optim.stored import SIGNED, round_trip
from thrice.runtime.technique import Arithmetic
from thrice.spec.job import Job


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What one step of one side came to; gradients as the optimizer saw them."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    sample_losses: Tensor | None = None
    """Mean loss of each sample, by its id, of the reference alone: how much rounding moves a loss is seen on many."""


class Reference:
    """The plain loop in an arithmetic: float32, float64, or the low precision of a job.

    A float16 reference scales its loss by a constant, without which its gradients would underflow. Where states
    are stored in fewer bits, they are rounded to them after each of torch's own updates.
    """

    def __init__(self, job: Job, vocabulary: int, device: torch.device, arithmetic: Arithmetic) -> None:
        self.job = job
        self.model = build_model(job, vocabulary, device).to(arithmetic.stored)
        plain = replace(job.optimizer, implementation="auto")
        self.optimizer = build_optimizer(self.model, plain, lr=job.lr, seed=job.seed)
        self.states = arithmetic.states
        self.reduced = arithmetic.reduced
        self.is_wide = arithmetic.stored is torch.float64
        self.autocast: Callable[[], AbstractContextManager[object]] = (
            nullcontext if arithmetic.computed is None else partial(torch.autocast, device.type, arithmetic.computed)
        )
        self.loss_scale = 1024.0 if arithmetic.computed is torch.float16 else 1.0
        self.lr_at = learning_rate(job)
        self.steps = self.samples = 0

    def step(
        self,
        ranks: list[list[Batch]],
        jittered_by: Observed | None = None,
        before: Callable[[int], None] = lambda rank: None,
    ) -> Observed:
        """`ranks` has the pieces of each rank in which dropout draws its masks, or the whole global batch as one.

        `before` is called with each rank before its pieces: it puts that rank's random state in place.
        With `jittered_by` the update takes each gradient as far off as it is from the one observed there. What
        rounding does to a parameter hangs on single elements: AdamW turns one whose gradient is near zero into a
        step of either sign, and one comparison may have none of them off.
        """
        window = [batch for pieces in ranks for batch in pieces]
        by_id = torch.tensor([sample for batch in window for sample in batch.sample_ids]).argsort()
        count = sum(int((batch.targets != IGNORE).sum()) for batch in window)
        loss = 0.0
        sample_losses = []
        named = dict(self.model.named_parameters())
        arrived: list[dict[str, Tensor]] = []
        for rank, pieces in enumerate(ranks):
            before(rank)
            for batch in pieces:
                with self.autocast():
                    logits = self.model(batch.inputs)
                wide = logits if logits.dtype is torch.float64 else logits.float()
                loss_sum = nn.functional.cross_entropy(
                    wide.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum"
                )
                torch.autograd.backward(loss_sum / (count / self.loss_scale))
                loss += loss_sum.item()
                sample_losses.append(_by_sample(wide.detach(), batch.targets))
            if self.reduced is not None:  # each rank's gradient travels in it, and is added up in it
                arrived.append({n: p.grad.to(self.reduced) for n, p in named.items() if p.grad is not None})
                self.optimizer.zero_grad()
        for name, parameter in named.items():
            if own := [of_rank[name] for of_rank in arrived if name in of_rank]:
                parameter.grad = sum(own[1:], start=own[0]).to(parameter.grad_dtype or parameter.dtype)
        for parameter in named.values():
            if parameter.grad is not None and self.loss_scale != 1.0:
                parameter.grad /= self.loss_scale
        norm = nn.utils.clip_grad_norm_(named.values(), self.job.optimizer.clip or math.inf)
        gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        if jittered_by is not None:
            _jitter(named, jittered_by.gradients)
        return Observed(
            loss=loss / count,
            grad_norm=norm.item(),
            gradients=gradients,
            parameters=self._update(sum(len(batch.sample_ids) for batch in window)),
            sample_losses=torch.cat(sample_losses)[by_id],
        )

    def replay(self, gradients: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """The parameters after an update with gradients that others have found, over so many samples.

        A parameter's path hangs on single gradients near zero, of which AdamW makes steps of either sign; on the same
        gradients there is no such chance, and an update is right to the last digits or wrong.
        """
        for name, parameter in self.model.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.dtype)
        return self._update(samples)

    def _update(self, samples: int) -> dict[str, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_at(self.steps, self.samples)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.states is not None:
            self._round_states()
        self.steps += 1
        self.samples += samples
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def _round_states(self) -> None:
        for state in self.optimizer.state.values():
            for name in state.keys() & SIGNED.keys():
                if state[name] is not None:
                    state[name].copy_(round_trip(name, state[name], self.states))


def _jitter(named: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Moves each element of a gradient up or down by the root mean square of its row's distance to the other.

    By row, because the rows of an embedding are of very different sizes, and one whose token did not occur is exact.
    """
    for name, parameter in named.items():
        if parameter.grad is not None:
            apart = (parameter.grad - others[name]).square()
            size = (apart.mean(-1, keepdim=True) if apart.ndim > 1 else apart.mean()).sqrt()
            signs = torch.randint(0, 2, parameter.shape, device=parameter.device) * 2 - 1
            parameter.grad += size * signs


def _by_sample(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """(B,) mean losses; NaN where a sample has no target."""
    losses_BT = nn.functional.cross_entropy(
        logits_BTV.transpose(1, 2), targets_BT, ignore_index=IGNORE, reduction="none"
    )
    return losses_BT.sum(1) / (targets_BT != IGNORE).sum(1)


def plain_windows(
    job: Job, count: int, steps: int, taken: list[list[int]]
) -> Iterator[tuple[Position | None, list[int]]]:
    """(where to jump to, or None; sample ids) of each window to verify, by the law and not by the job's loader.

    First those from the start; the `steps`-th is the last of the epoch, and what follows it comes after. `taken`
    are the sample ids of the steps taken so far, kept up to date by the caller: a batch ramp counts them.
    """
    ledger = job.ledger()
    epoch = offset = 0
    while True:
        batch = ledger.global_batch_at(sum(len(ids) for ids in taken))
        target = None
        if len(taken) == steps - 1 and epoch == 0:
            whole = count // batch * batch
            last = whole if whole < count and job.last_window == "step" else whole - batch
            if last > offset:
                offset = last
                target = Position(epoch=0, offset=offset)
        if count - offset < (batch if job.last_window == "drop" else 1):
            epoch, offset = epoch + 1, 0
        end = min(offset + batch, count)
        yield target, [int(i) for i in order(job.seed, epoch, count, range(offset, end))]
        offset = end
