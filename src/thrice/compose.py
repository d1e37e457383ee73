"""The only place that assembles a Job: for real, and under fake tensors for a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from thrice.data.batches import Batch
from thrice.errors import ConfigError, Problem
from thrice.model.decoder import build_decoder
from thrice.model.loss import cross_entropy_sum
from thrice.optim.build import build_optimizer
from thrice.optim.schedules import learning_rate
from thrice.runtime.dist import ALONE, World
from thrice.runtime.session import Session
from thrice.runtime.technique import Claim, Slot, Technique
from thrice.runtime.vector_math import settle_vector_math
from thrice.spec.job import Job
from thrice.spec.workload import Ledger
from thrice.techniques.data_parallel import DataParallel

COMPOSED = "_thrice_composed"
"""Attribute of a model: the techniques that were applied to it. A copy of the model has their patches, and it too."""

settle_vector_math()  # on import: before a model computes its tables, and outside of fake tensors


def techniques_of(job: Job) -> list[Technique]:
    """Those that are asked for, and plain replicas where processes share the data and no technique says how."""
    techniques: list[Technique] = list(job.techniques)
    if job.mesh().data_parallel > 1 and all(technique.slot is not Slot.REPLICATE for technique in techniques):
        techniques.append(DataParallel())
    return techniques


def refuse(job: Job) -> Iterator[Problem]:
    """Why this job cannot run, beyond what each field says alone."""
    owners: dict[str, str] = {}
    for technique in techniques_of(job):
        if technique.slot in owners:
            yield Problem(
                key=technique.name,
                why=f"{owners[technique.slot]} owns {technique.slot} already, and only one technique can",
                fix=f"keep one of {owners[technique.slot]} and {technique.name}",
            )
        owners[technique.slot] = technique.name
        yield from technique.refuse(job)


def claim(job: Job) -> Claim:
    """The weakest equality that a part of the job promises; a window cut in pieces sums in another order."""
    cut = Claim.ROUNDING if job.ledger().grad_accum_steps > 1 else Claim.BITWISE
    parts: list[Claim] = [technique.claim() for technique in techniques_of(job)]
    return max([cut, *parts])


def mathematics(job: Job) -> Iterator[str]:
    """What makes the job another algorithm than AdamW or SGD at a fixed batch: knowingly, and said (semantics)."""
    other = {"lamb": ("LAMB", "AdamW"), "lars": ("LARS", "SGD"), "muon": ("Muon", "AdamW")}.get(job.optimizer.name)
    if other is not None:
        yield f"{other[0]} is another algorithm than {other[1]}, not another way to run it"
    ramp = job.ledger().ramp
    if ramp is not None:
        yield f"the batch grows from {ramp.start} to {ramp.target}: another algorithm than at a fixed batch"


def compose(
    job: Job,
    *,
    vocabulary: int,
    device: torch.device | None = None,
    model: nn.Module | None = None,
    world: World = ALONE,
) -> Session:
    """The session of a job: model, techniques in the order of their stages, optimizer.

    `vocabulary` is the tokenizer's size, and the model that the job describes has a row for each. `device` is the
    first accelerator, or the CPU where there is none. A `model` of the caller's takes the place of the job's; its
    parameters stay where they are, and it is not held against `vocabulary`. Every rank of `world` calls it. Raises
    ConfigError with every refusal at once; a model that techniques were applied to before is refused, for what they
    changed in it stays.
    """
    ledger = job.ledger()
    assert world.size in (1, job.processes), "alone it stands for one rank of them, in a rehearsal"
    problems = [*refuse(job), *(() if model is None else _composed_before(model))]
    if problems:
        raise ConfigError(problems)
    device = device or world.device or default_device()
    if model is None:
        model = build_model(job, vocabulary, device)
    session = Session(
        job=job,
        ledger=ledger,
        device=device,
        world=world,
        model=model.train(),
        output=model,
        loss=cross_entropy_sum,
        example=partial(_example, ledger, device),
        lr_at=learning_rate(job),
    )
    for technique in sorted(techniques_of(job), key=lambda technique: technique.stage):
        session.applied[technique.name] = technique.apply(session)
        setattr(model, COMPOSED, ", ".join(session.applied))
    optimizer = build_optimizer(
        model,
        job.optimizer,
        lr=ledger.lr,
        seed=job.seed,
        rounding=session.rounding,
        states=session.states,
        in_backward=session.in_backward is not None,
        share=None if session.shards is None else session.shards.share,
    )
    if session.in_backward is not None:
        session.in_backward.attach(model, optimizer)
    session.optimizer = optimizer
    return session


def _composed_before(model: nn.Module) -> Iterator[Problem]:
    for name, module in model.named_modules():
        before = vars(module).get(COMPOSED)
        if before is not None:
            yield Problem(
                key="model",
                value=type(model).__name__,
                why=f"{f'its part {name}' if name else 'it'} was composed before, with {before}, whose changes to its "
                "modules would run on",
                fix="build the model again, and load_state_dict() the weights of this one",
            )


def _example(ledger: Ledger, device: torch.device) -> Batch:
    inputs, targets = torch.zeros(2, ledger.micro_batch, ledger.sequence, dtype=torch.int64, device=device).unbind()
    ids = tuple(range(ledger.micro_batch))
    return Batch(inputs=inputs, targets=targets, sample_ids=ids, count=targets.numel())


def build_model(job: Job, vocabulary: int, device: torch.device) -> nn.Module:
    """The model that the job describes, its weights a function of the seed alone."""
    rows = job.decoder.vocabulary or vocabulary
    if rows < vocabulary:
        raise ConfigError(
            [
                Problem(
                    key="decoder.vocabulary",
                    value=rows,
                    why=f'the tokenizer "{job.tokenizer}" has {vocabulary} tokens',
                    fix=f"decoder.vocabulary = {vocabulary}, or leave it out",
                )
            ]
        )
    positions = job.decoder.max_positions or job.sequence
    return build_decoder(job.decoder, vocabulary=rows, positions=positions, device=device, seed=job.seed)


def default_device() -> torch.device:
    """The current accelerator, or the CPU."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")
