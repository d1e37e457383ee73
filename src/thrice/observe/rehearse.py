"""One training step on fake tensors: the very code that trains, with nothing computed and nothing allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thrice.compose import compose
from thrice.observe.trace import ACTIVATIONS, INPUTS, Trace, Tracer
from thrice.spec.job import Job
from thrice.step import train_step


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    trace: Trace
    """Of a second step, since the first makes the optimizer's states, over `traced` micro-batches."""
    traced: int
    grad_accum_steps: int
    """Micro-batches of the whole step."""
    parameters: int
    applied: dict[str, str]
    """Technique -> what it did."""

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the peak of the whole step.

        Each further micro-batch holds its inputs and its loss, and nothing else that stays.
        """
        more = self.grad_accum_steps - self.traced
        inputs = self.trace.at_peak[INPUTS] // self.traced
        at_peak = dict(self.trace.at_peak)
        at_peak[INPUTS] += more * inputs
        at_peak[ACTIVATIONS] += more * torch.float32.itemsize
        return at_peak

    @property
    def peak_bytes(self) -> int:
        return sum(self.at_peak.values())

    @property
    def flops(self) -> int:
        """Of the whole step; each micro-batch costs the same, and the optimizer has no operator that counts."""
        return self.trace.flops * self.grad_accum_steps // self.traced


def rehearse(job: Job, vocabulary: int, workspaces: dict[tuple[Any, ...], int] | None = None) -> Rehearsal:
    """Composes the job under fake tensors that stand in for the CPU's, and follows one step.

    Two micro-batches stand for however many there are: a window of hundreds would take minutes. Bytes are those
    of tensors; what the allocator and the process itself need comes on top, and so does what a kernel takes beside
    its result, unless it is handed in as the `workspaces` of a Tracer on real tensors. Raises what `compose` raises.
    """
    # the random state is real even where tensors are not: a rehearsal leaves it as it was
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        session = compose(job, vocabulary=vocabulary, device=torch.device("cpu"))
        window = [session.example() for _ in range(min(2, session.ledger.grad_accum_steps))]
        train_step(session, window)
        with Tracer(session.model, session.optimizer, workspaces=workspaces) as tracer:
            train_step(session, window)
        return Rehearsal(
            trace=tracer.trace(),
            traced=len(window),
            grad_accum_steps=session.ledger.grad_accum_steps,
            parameters=sum(parameter.numel() for parameter in session.model.parameters()),
            applied=session.applied,
        )
