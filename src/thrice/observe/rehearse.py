"""One training step on fake tensors: the very code that trains, with nothing computed and nothing allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thrice.compose import compose
from thrice.observe.trace import Trace, Tracer
from thrice.spec.job import Job
from thrice.step import train_step


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    trace: Trace
    """Of the second step: the first makes the optimizer's states."""
    parameters: int
    applied: dict[str, str]
    """Technique -> what it did."""


def rehearse(job: Job, vocabulary: int) -> Rehearsal:
    """Composes the job under fake tensors that stand in for the CPU's, and follows one step.

    Bytes are those of tensors; what the allocator and the process itself need comes on top. Raises what
    `compose` raises.
    """
    # the random state is real even where tensors are not: a rehearsal leaves it as it was
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        session = compose(job, vocabulary=vocabulary, device=torch.device("cpu"))
        window = [session.example() for _ in range(session.ledger.grad_accum_steps)]
        train_step(session, window)
        with Tracer(session.model, session.optimizer) as tracer:
            train_step(session, window)
        return Rehearsal(
            trace=tracer.trace(),
            parameters=sum(parameter.numel() for parameter in session.model.parameters()),
            applied=session.applied,
        )
