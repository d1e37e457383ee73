"""Proves that a Job computes what a plain single-process loop computes, or names the first tensor that differs.

The job runs as composed, beside a reference that knows no technique: one process, float32, the whole global
batch at once, plain torch. What may lie between them is what the job's claim promises (BITWISE: nothing), held
against a noise floor measured in the same run: the reference in float64 for ROUNDING, the reference in the
job's precision for LOWER_PRECISION.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from thrice.compose import build_model, claim, compose
from thrice.data.batches import IGNORE, Batch, Position, order
from thrice.data.load import Data
from thrice.optim.build import build_optimizer
from thrice.optim.schedules import lr_at
from thrice.runtime.session import Session
from thrice.runtime.technique import Claim
from thrice.spec.dump import dump
from thrice.spec.job import Job
from thrice.spec.seed import key
from thrice.step import train_step

ALLOWED_FLOORS = 4.0
"""A deviation passes up to this many noise floors: the floor is one draw of the same rounding, and the largest
of some hundred draws stays within it; a missing factor or a lost term is off by thousands."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One compared quantity. Deviations are ‖got − expected‖ / ‖expected‖, in float64."""

    step: int
    kind: str
    """sample_ids, loss, gradient, grad_norm or parameter."""
    tensor: str
    deviation: float
    floor: float
    allowed: float
    where: str
    """The element that is furthest off: its index, what was got and what was expected."""

    @property
    def ok(self) -> bool:
        return self.deviation <= self.allowed  # false for NaN, as it must be


@dataclass(frozen=True, kw_only=True)
class Certificate:
    claim: str
    steps: int
    samples: list[list[int]]
    """Which samples each verified step saw."""
    notes: list[str]
    job: str
    """The Job, as a file that reproduces it."""
    torch: str
    device: str
    rows: list[Row] = field(repr=False)

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def first_difference(self) -> Row | None:
        return next((row for row in self.rows if not row.ok), None)

    def as_dict(self) -> dict[str, object]:
        rows = [{**asdict(row), "ok": row.ok} for row in self.rows]
        first = next((row for row in rows if not row["ok"]), None)
        return {"ok": self.ok, **asdict(self), "first_difference": first, "rows": rows}


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What one step of one side came to; gradients as the optimizer saw them."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


class Reference:
    """The plain loop. It shares the model and torch's optimizer with the job, and nothing else.

    `dtype` is the parameters'; `autocast` the compute's where it differs. A float16 reference scales its loss
    by a constant, without which its gradients would underflow.
    """

    def __init__(
        self,
        job: Job,
        vocabulary: int,
        device: torch.device,
        dtype: torch.dtype,
        autocast: torch.dtype | None,
    ) -> None:
        self.job = job
        self.model = build_model(job, vocabulary, device).to(dtype)
        self.optimizer = build_optimizer(self.model, job.optimizer, lr=job.lr, seed=job.seed)
        self.autocast: Callable[[], AbstractContextManager[object]] = (
            nullcontext if autocast is None else partial(torch.autocast, device.type, autocast)
        )
        self.loss_scale = 1024.0 if autocast is torch.float16 else 1.0
        self.steps = 0

    def step(self, window: list[Batch]) -> Observed:
        """`window` is the whole global batch in one piece, or the pieces in which dropout draws its masks."""
        count = sum(int((batch.targets != IGNORE).sum()) for batch in window)
        loss = 0.0
        for batch in window:
            with self.autocast():
                logits = self.model(batch.inputs)
            wide = logits if logits.dtype is torch.float64 else logits.float()
            loss_sum = nn.functional.cross_entropy(
                wide.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            torch.autograd.backward(loss_sum / (count / self.loss_scale))
            loss += loss_sum.item()
        named = dict(self.model.named_parameters())
        for parameter in named.values():
            if parameter.grad is not None and self.loss_scale != 1.0:
                parameter.grad /= self.loss_scale
        norm = nn.utils.clip_grad_norm_(named.values(), self.job.optimizer.clip or math.inf)
        gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.steps, peak=self.job.lr, schedule=self.job.schedule, total_steps=self.job.steps())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return Observed(
            loss=loss / count,
            grad_norm=norm.item(),
            gradients=gradients,
            parameters={n: p.detach() for n, p in named.items()},
        )


class Subject:
    """The job as composed, watched: its gradients are taken just before the optimizer uses them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.gradients: dict[str, Tensor] = {}
        session.optimizer.register_step_pre_hook(self._take)

    def _take(self, *_: object) -> None:
        named = self.session.model.named_parameters()
        self.gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}

    def step(self, window: list[Batch]) -> Observed | None:
        """None where the loss scaler skipped the step."""
        result = train_step(self.session, window)
        if not result.taken or result.loss is None or result.grad_norm is None:
            return None
        named = self.session.model.named_parameters()
        return Observed(
            loss=result.loss,
            grad_norm=result.grad_norm,
            gradients=self.gradients,
            parameters={n: p.detach() for n, p in named},
        )


def verify(job: Job, data: Data, *, steps: int = 4, compose: Callable[..., Session] = compose) -> Certificate:
    """Runs `steps` optimizer steps of the job and of the reference and compares everything they compute.

    The last of them is the last window of the epoch, the shorter one where the epoch does not divide. Steps
    that the loss scaler skips are noted and not counted. Raises what `compose` and `train_step` raise.
    """
    promised = claim(job)
    session = compose(job, vocabulary=data.tokenizer.vocabulary)
    subject = Subject(session)
    device = session.device
    reference = Reference(job, data.tokenizer.vocabulary, device, torch.float32, None)
    floor = _floor(job, promised, data.tokenizer.vocabulary, device)
    windows = plain_windows(job, len(data.train), steps)
    measured: list[tuple[int, str, str, float, float, str]] = []
    samples: list[list[int]] = []
    notes = [_compared_with(promised)]
    position = Position(epoch=0, offset=0)
    for start, expected_ids in windows:
        position = start if start is not None else position
        window, position = data.window(position)
        window = [batch.to(device) for batch in window]
        got_ids = [i for batch in window for i in batch.sample_ids]
        torch.manual_seed(key(job.seed, "verify", len(samples)))
        got = subject.step(window)
        if got is None:
            notes.append(f"window {len(samples)}: skipped by the loss scaler, and by the reference")
            continue
        samples.append(expected_ids)
        step = len(samples)
        whole = [data.train.batch(expected_ids).to(device)]
        pieces = whole if job.decoder.dropout == 0 else window
        expected = _seeded(job, step - 1, reference, pieces)
        # a low precision rounds each micro-batch's gradient, so its floor is taken over the same ones
        cut = window if promised is Claim.LOWER_PRECISION else pieces
        noise = _seeded(job, step - 1, floor, cut) if floor is not None else expected
        measured.append(
            (
                step,
                "sample_ids",
                "",
                float(got_ids != expected_ids),
                0.0,
                f"{got_ids[:8]} for {expected_ids[:8]}",
            )
        )
        measured.extend(_measure(step, got, expected, noise))
        if step == steps:
            break
    if job.decoder.dropout > 0:
        notes.append("dropout is on: the reference takes the same micro-batches, so that it draws the same masks")
    return Certificate(
        claim=promised.name,
        steps=len(samples),
        samples=samples,
        notes=notes,
        job=dump(job),
        torch=torch.__version__,
        device=str(device),
        rows=_judge(measured, promised),
    )


def plain_windows(job: Job, count: int, steps: int) -> Iterator[tuple[Position | None, list[int]]]:
    """(where to jump to, or None; sample ids) of each window to verify, by the law and not by the job's loader.

    First those from the start; from the `steps`-th on, the last of the epoch and what follows it.
    """
    global_batch = job.ledger().global_batch
    starts = list(range(0, count, global_batch))
    if job.last_window == "drop" and count % global_batch:
        starts.pop()
    jump = max(0, len(starts) - 1)
    epoch, index, given = 0, 0, 0
    while True:
        target = None
        if given == steps - 1 and epoch == 0 and index < jump:
            index = jump
            target = Position(epoch=0, offset=starts[jump])
        begin = starts[index]
        ids = order(job.seed, epoch, count, range(begin, min(begin + global_batch, count)))
        yield target, [int(i) for i in ids]
        given += 1
        index += 1
        if index == len(starts):
            epoch, index = epoch + 1, 0


def _seeded(job: Job, index: int, reference: Reference, window: list[Batch]) -> Observed:
    torch.manual_seed(key(job.seed, "verify", index))
    return reference.step(window)


def _floor(job: Job, promised: Claim, vocabulary: int, device: torch.device) -> Reference | None:
    if promised is Claim.BITWISE:
        return None
    if promised is Claim.ROUNDING:
        return Reference(job, vocabulary, device, torch.float64, None)
    low = [a for technique in job.techniques if (a := technique.arithmetic()) is not None]
    assert len(low) == 1, "one technique owns the numerics, and a claim of LOWER_PRECISION is its"
    return Reference(job, vocabulary, device, low[0].stored, low[0].computed)


def _compared_with(promised: Claim) -> str:
    return {
        Claim.BITWISE: "no deviation is allowed",
        Claim.ROUNDING: "floor: the reference in float64 against itself in float32",
        Claim.LOWER_PRECISION: "floor: the reference in the job's precision and micro-batches against float32",
    }[promised]


def _measure(
    step: int, got: Observed, expected: Observed, noise: Observed
) -> Iterator[tuple[int, str, str, float, float, str]]:
    for kind, name in (("loss", "loss"), ("grad_norm", "grad_norm")):
        value, right, other = (getattr(side, name) for side in (got, expected, noise))
        scale = abs(right) or 1.0
        yield (
            step,
            kind,
            "",
            abs(value - right) / scale,
            abs(other - right) / scale,
            f"{value!r} for {right!r}",
        )
    for kind in ("gradient", "parameter"):
        ours, plain, other = (getattr(side, f"{kind}s") for side in (got, expected, noise))
        for name in plain | ours:
            if name not in ours or name not in plain:
                missing = "the job" if name not in ours else "the reference"
                yield step, kind, name, math.inf, 0.0, f"{missing} has no such {kind}"
                continue
            deviation, where = _deviation(ours[name], plain[name])
            yield step, kind, name, deviation, _deviation(other[name], plain[name])[0], where


def _deviation(got: Tensor, expected: Tensor) -> tuple[float, str]:
    wide, right = got.double(), expected.double()
    difference = (wide - right).abs()
    deviation = float(difference.norm() / (right.norm() if right.norm() > 0 else 1.0))
    if deviation == 0:
        return 0.0, ""
    worst = int(difference.nan_to_num(math.inf).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)]
    return deviation, f"{index}: {wide.flatten()[worst]:.9g} for {right.flatten()[worst]:.9g}"


def _judge(measured: list[tuple[int, str, str, float, float, str]], promised: Claim) -> list[Row]:
    """Sets each deviation beside what is allowed.

    A single number's floor can be small by luck, so a quantity is held to the larger of its own floor and the
    median floor of its kind in that step (tensors) or the largest over all steps (loss and norm). A float32
    loss or norm is not known better than float32's spacing.
    """
    pools: dict[tuple[int, str], list[float]] = {}
    for step, kind, _, _, floor, _ in measured:
        pools.setdefault((step if kind in ("gradient", "parameter") else 0, kind), []).append(floor)
    rows = []
    for step, kind, tensor, deviation, floor, where in measured:
        tensors = kind in ("gradient", "parameter")
        pool = pools[step if tensors else 0, kind]
        common = median(pool) if tensors else max(*pool, torch.finfo(torch.float32).eps)
        exact = promised is Claim.BITWISE or kind == "sample_ids"
        allowed = 0.0 if exact else ALLOWED_FLOORS * max(floor, common)
        rows.append(
            Row(
                step=step, kind=kind, tensor=tensor, deviation=deviation,
                floor=floor, allowed=allowed, where=where,
            )
        )  # fmt: skip
    return rows
