"""Proves that a Job computes what a plain single-process loop computes, or names the first tensor that differs.

The job runs as composed, beside a reference that knows no technique: one process, float32, the whole global
batch at once, plain torch. What may lie between them is what the job's claim promises (BITWISE: nothing), held
against a noise floor measured in the same run: for ROUNDING the reference in float64 and over the job's
micro-batches, for LOWER_PRECISION the reference in the job's precision. Updates are held against the plain optimizer
on the job's own gradients as well, where nothing but its arithmetic is between them. Where the job runs in several
processes, each has its own share of the data, rank 0 has the reference, and every rank's parameters are held against
rank 0's, to the last bit.

The algorithm is the job's own in both, its optimizer and its batch ramp included: what is proven is that the stack
computes that algorithm, not that the algorithm is AdamW at a fixed batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from thrice.certificate import Certificate, Row, judged
from thrice.compose import claim, compose, mathematics
from thrice.data.batches import Batch, Position, cut
from thrice.data.load import Data
from thrice.reference import Observed, Reference, plain_windows
from thrice.runtime.dist import ALONE, World
from thrice.runtime.session import Session
from thrice.runtime.technique import Arithmetic, Claim
from thrice.spec.dump import dump
from thrice.spec.job import Job
from thrice.spec.seed import key
from thrice.step import train_step

COMPARED_WITH = {
    Claim.BITWISE: "no deviation is allowed",
    Claim.ROUNDING: "floor: the reference in float64, and in float32 over the job's micro-batches, against float32",
    Claim.LOWER_PRECISION: "floor: the reference in the job's precision and micro-batches against float32",
}


class Subject:
    """The job as composed, watched: its gradients are taken just before the optimizer uses them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.gradients: dict[str, Tensor] = {}
        session.optimizer.register_step_pre_hook(self._take)

    def _take(self, *_: object) -> None:
        # an optimizer of parts is here once for each; one that steps within backward has one gradient at a time
        named = {n: p.grad for n, p in self.session.trained() if p.grad is not None}
        self.gradients |= {n: gradient.clone() for n, gradient in self.session.whole(named).items()}

    def step(self, window: list[Batch]) -> Observed | None:
        """None where the loss scaler skipped the step."""
        self.gradients = {}
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


def verify(
    job: Job, data: Data, *, steps: int = 4, compose: Callable[..., Session] = compose, world: World = ALONE
) -> Certificate:
    """Runs `steps` optimizer steps of the job and of the reference and compares everything they compute.

    The last of them is the last window of the epoch, the shorter one where the epoch does not divide. Steps
    that the loss scaler skips are noted and not counted. Every rank of `world` calls it and gets the same certificate.
    Raises what `compose` and `train_step` raise.
    """
    world.must_be(job.processes)
    promised = claim(job)
    session = compose(job, vocabulary=data.tokenizer.vocabulary, world=world)
    device = session.device
    subject = Subject(session)
    # the other ranks only take the job's steps
    witness = Witness(job, data, promised, world.size, device) if world.rank == 0 else None
    rows: list[Row] = []
    samples: list[list[int]] = []
    notes = [COMPARED_WITH[promised], *mathematics(job)]
    position = Position(epoch=0, offset=0)
    for start, expected_ids in plain_windows(job, len(data.train), steps, samples):
        position = start if start is not None else position
        batch = session.ledger.global_batch_at(session.progress.samples)
        window, position = data.window(position, batch, rank=world.rank, ranks=world.size)
        window = [batch.to(device) for batch in window]
        got_ids = _in_order(world.gather([list(batch.sample_ids) for batch in window]))
        _seed(job, len(samples), world.rank)
        got = subject.step(window)
        if got is None:
            notes.append(f"window {len(samples)}: skipped by the loss scaler, and by the reference")
            continue
        samples.append(expected_ids)
        step = len(samples)
        order = f"{got_ids[:8]} for {expected_ids[:8]}"
        rows.append(Row(step=step, kind="sample_ids", deviation=float(got_ids != expected_ids), where=order))
        replicas = _replicas(step, got.parameters, world)
        if witness is not None:
            rows.extend(witness.reference(step, expected_ids, got))
            rows.extend(replicas)
            rows.extend(witness.update(step, expected_ids, got))
        if step == steps:
            break
    if job.decoder.dropout > 0:
        notes.append("dropout is on: the reference takes the same micro-batches, so that it draws the same masks")
    certificate = Certificate(
        claim=promised.name,
        steps=len(samples),
        samples=samples,
        notes=notes,
        job=dump(job),
        torch=torch.__version__,
        device=str(device),
        processes=world.size,
        rows=judged(rows, promised, {} if witness is None else witness.draws),
    )
    return world.broadcast(certificate)


class Witness:
    """The plain loops that the job is held against: the reference, those that show its noise, and the replays."""

    def __init__(self, job: Job, data: Data, promised: Claim, ranks: int, device: torch.device) -> None:
        build = partial(Reference, job, data.tokenizer.vocabulary, device)
        self._job, self._data, self._ranks, self._device = job, data, ranks, device
        self._reference = build(Arithmetic())
        self._floors = [build(other) for other in _other_arithmetics(job, promised)]
        self._replays = [build(other) for other in [Arithmetic(), *_other_storages(job, promised)]]
        self.draws: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        """Floors of the parts of a number, of each step."""

    def reference(self, step: int, ids: list[int], got: Observed) -> Iterator[Row]:
        """The step of the reference on the samples of the law, and not on what the job's loader made of them."""
        micro_batch = self._job.ledger().micro_batch
        parts = [cut(np.array(ids), micro_batch, rank, self._ranks) for rank in range(self._ranks)]
        pieces = [[self._data.train.batch(part).to(self._device) for part in of_rank] for of_rank in parts]
        whole = [[self._data.train.batch(ids).to(self._device)]]
        expected = self._seeded(step, self._reference, whole if self._job.decoder.dropout == 0 else pieces)
        # floors are taken over micro-batches: each one's gradient is rounded, and sums have that order
        noise = [self._seeded(step, floor, pieces, expected if floor.is_wide else None) for floor in self._floors]
        for other in noise:
            self.draws["loss"] += _sample_floors(other, expected)
            self.draws["grad_norm"] += _norm_floors(other, expected)
        return _compared(step, got, expected, noise)

    def update(self, step: int, ids: list[int], got: Observed) -> Iterator[Row]:
        """The plain optimizer's, on the job's own gradients."""
        updated = [replay.replay(got.gradients, len(ids)) for replay in self._replays]
        return _tensors(step, "update", got.parameters, *updated)

    def _seeded(
        self, step: int, reference: Reference, pieces: list[list[Batch]], jittered_by: Observed | None = None
    ) -> Observed:
        """Each rank's pieces draw their masks from the state that the rank itself has."""
        return reference.step(pieces, jittered_by, lambda rank: _seed(self._job, step - 1, rank))


def _in_order(of_ranks: list[list[list[int]]]) -> list[int]:
    """Sample ids of a window as its ranks have them, in the order of the data: piece j is rank j mod ranks'."""
    return [sample for round_ in zip_longest(*of_ranks, fillvalue=()) for piece in round_ for sample in piece]


def _seed(job: Job, index: int, rank: int) -> None:
    torch.manual_seed(key(job.seed, "verify", index, rank))


def _replicas(step: int, parameters: dict[str, Tensor], world: World) -> list[Row]:
    """For each other rank whether its parameters are rank 0's to the last bit, or the first that is not; collective."""
    if world.size == 1:
        return []
    of_ranks = world.gather({name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in parameters.items()})
    first, *others = of_ranks
    differ = [next((name for name in own if own[name] != first.get(name)), "") for own in others]
    return [
        Row(step=step, kind="replica", tensor=f"rank {rank}", deviation=float(bool(name)), where=name)
        for rank, name in enumerate(differ, 1)
    ]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _other_arithmetics(job: Job, promised: Claim) -> list[Arithmetic]:
    """Those in which the reference runs once more, to show what rounding alone brings about."""
    if promised is Claim.BITWISE:
        return []
    wide, low = Arithmetic(stored=torch.float64), arithmetic(job)
    # in float32 throughout, or but for stored states, what rounds is the order of sums: seen against float64, and
    # over the job's micro-batches against the whole batch
    in_float32 = low.stored is torch.float32 and low.computed is None and low.reduced is None
    return [wide, low] if in_float32 else [low]


def _other_storages(job: Job, promised: Claim) -> list[Arithmetic]:
    """Those in which the optimizer runs once more on the job's own gradients: how it was computed is of no account."""
    if promised is Claim.BITWISE:
        return []
    low = arithmetic(job)
    kept = [Arithmetic(stored=low.stored, states=low.states)]
    return kept if low.stored is not torch.float32 else [Arithmetic(stored=torch.float64), *kept]


def arithmetic(job: Job) -> Arithmetic:
    """The low precision of the whole job: each technique says what of it is its own."""
    parts = [part for technique in job.techniques if (part := technique.arithmetic()) is not None]
    plain = Arithmetic()
    return Arithmetic(
        stored=next((part.stored for part in parts if part.stored is not plain.stored), plain.stored),
        computed=next((part.computed for part in parts if part.computed is not None), None),
        states=next((part.states for part in parts if part.states is not None), None),
        reduced=next((part.reduced for part in parts if part.reduced is not None), None),
    )


def _compared(step: int, got: Observed, expected: Observed, noise: list[Observed]) -> Iterator[Row]:
    for kind in ("loss", "grad_norm"):
        value, right = getattr(got, kind), getattr(expected, kind)
        scale = abs(right) or 1.0
        yield Row(
            step=step,
            kind=kind,
            deviation=abs(value - right) / scale,
            floor=max((abs(getattr(other, kind) - right) / scale for other in noise), default=0.0),
            where=f"{value!r} for {right!r}",
        )
    for kind in ("gradient", "parameter"):
        yield from _tensors(step, kind, *(getattr(side, f"{kind}s") for side in (got, expected, *noise)))


def _tensors(
    step: int, kind: str, ours: dict[str, Tensor], plain: dict[str, Tensor], *others: dict[str, Tensor]
) -> Iterator[Row]:
    for name in plain | ours:
        if name not in ours or name not in plain:
            missing = "the job" if name not in ours else "the reference"
            yield Row(step=step, kind=kind, tensor=name, deviation=math.inf, where=f"{missing} has no such {kind}")
            continue
        deviation, where = _deviation(ours[name], plain[name])
        floor = max((_deviation(other[name], plain[name])[0] for other in others), default=0.0)
        yield Row(step=step, kind=kind, tensor=name, deviation=deviation, floor=floor, where=where)


def _sample_floors(other: Observed, expected: Observed) -> list[float]:
    assert other.sample_losses is not None
    assert expected.sample_losses is not None
    floors = (other.sample_losses.double() / expected.sample_losses.double() - 1).abs()
    return [float(floor) for floor in floors[floors.isfinite()]]


def _norm_floors(other: Observed, expected: Observed) -> list[float]:
    norms = [
        (other.gradients[name].double().norm(), plain.double().norm()) for name, plain in expected.gradients.items()
    ]
    return [float((noisy / plain - 1).abs()) for noisy, plain in norms if plain > 0]


def _deviation(got: Tensor, expected: Tensor) -> tuple[float, str]:
    wide, right = got.double(), expected.double()
    difference = (wide - right).abs()
    deviation = float(difference.norm() / (right.norm() if right.norm() > 0 else 1.0))
    if deviation == 0:
        return 0.0, ""
    worst = int(difference.nan_to_num(math.inf).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)]
    return deviation, f"{index}: {wide.flatten()[worst]:.9g} for {right.flatten()[worst]:.9g}"
