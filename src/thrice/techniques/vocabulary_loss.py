"""The loss over the vocabulary, with or without the whole matrix of logits.

`whole` is the plain loss: logits of every token, and copies of them in float32. `chunked` computes logits, loss and
gradients for some tokens at a time, and never holds more (as Liger Kernel, arXiv:2410.10989; see model/loss.py). The
model then runs without its head: what reaches the head is what the loss takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from thrice.errors import ConfigError, Problem
from thrice.model.anatomy import head
from thrice.model.loss import CHUNK_TOKENS, chunked_cross_entropy_sum
from thrice.observe.trace import Tracer
from thrice.runtime.fakes import faked, restore_forward
from thrice.runtime.memory import free_bytes, shown
from thrice.runtime.session import Session
from thrice.runtime.stopwatch import seconds
from thrice.runtime.technique import Claim, Slot, Stage
from thrice.spec.job import Job, at_least

SLOWER = 1.02
"""`auto` takes the chunked loss up to this many times the plain one's time: two timings differ by as much."""

Run = Callable[[Tensor, Tensor], Tensor]
"""(what reaches the head, targets) -> the loss."""


@final
@dataclass(frozen=True, kw_only=True)
class VocabularyLoss:
    name: ClassVar[str] = "vocabulary_loss"
    stage: ClassVar[Stage] = Stage.LAYERS
    slot: ClassVar[Slot] = Slot.HEAD

    mode: Literal["whole", "chunked", "auto"] = "whole"
    """`auto` times both on the job's own shapes and takes `chunked` where it is not slower."""
    chunk_tokens: int | None = None
    """chunked and auto: tokens whose logits exist at once; 256 where not given."""

    @classmethod
    def examples(cls) -> Iterable[Self]:
        """Not `auto`: it becomes one of the other two, and which is a matter of the machine's speed."""
        yield cls(mode="whole")
        yield cls(mode="chunked", chunk_tokens=24)

    def check(self) -> Iterator[Problem]:
        yield from at_least(1, chunk_tokens=self.chunk_tokens)
        if self.chunk_tokens is not None and self.mode == "whole":
            yield Problem(
                key="chunk_tokens",
                value=self.chunk_tokens,
                why='the mode is "whole", which has no chunks',
                fix='leave it out, or set mode = "chunked"',
            )

    def refuse(self, job: Job) -> Iterator[Problem]:
        return iter(())

    def apply(self, session: Session) -> str:
        if self.mode == "whole":
            return "the whole matrix of logits"
        layer = head(session.model)
        taken = _input_of_head(session, layer)
        chunk_tokens = self.chunk_tokens or CHUNK_TOKENS
        chunked = partial(_chunked, layer, chunk_tokens)
        line = f"logits of {chunk_tokens} tokens at a time"
        if self.mode == "auto":
            # rank 0's, so that all take the same: each measures, and they might differ
            whole, why = session.world.broadcast(_whole_is_better(session, layer, taken, chunked))
            # the run's own file names what was chosen: timed again, a run that goes on might choose otherwise
            chosen = replace(self, mode="whole", chunk_tokens=None) if whole else replace(self, mode="chunked")
            others = (chosen if part is self else part for part in session.job.techniques)
            session.job = replace(session.job, techniques=tuple(others))
            if whole:
                return why
            line += f"; {why}"
        session.output, session.loss = partial(_without_head, session.model, layer), chunked
        return line

    def claim(self) -> Claim:
        return Claim.BITWISE if self.mode == "whole" else Claim.ROUNDING

    def arithmetic(self) -> None:
        return None


def _chunked(layer: nn.Linear, chunk_tokens: int, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
    return chunked_cross_entropy_sum(hidden_BTD, targets_BT, layer.weight, layer.bias, chunk_tokens=chunk_tokens)


def _without_head(model: nn.Module, layer: nn.Linear, inputs: Tensor) -> Tensor:
    with _head_as(layer, lambda hidden: hidden):
        hidden: Tensor = model(inputs)
        return hidden


@contextmanager
def _head_as(layer: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    own = layer.__dict__.get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        restore_forward(layer, own)


def _input_of_head(session: Session, layer: nn.Linear) -> tuple[torch.Size, torch.dtype]:
    """(shape, dtype) of what reaches the head.

    Raises ConfigError unless the model's output is the head's, untouched: found by running it on fake tensors.
    """
    seen: list[tuple[Tensor, Tensor, int]] = []

    def watched(hidden: Tensor) -> Tensor:
        logits = nn.functional.linear(hidden, layer.weight, layer.bias)
        seen.append((hidden, logits, logits._version))
        return logits

    why = ""
    with faked(session.model):
        inputs = session.example().inputs
        with _head_as(layer, watched), session.compute():
            output: Any = session.model(inputs)
    if type(layer).forward is not nn.Linear.forward:
        why = f"its head is a {type(layer).__name__} with a forward of its own"
    elif len(seen) != 1:
        why = f"its head runs {len(seen)} times in one forward"
    elif output is not seen[0][1] or output._version != seen[0][2]:
        why = "something follows the head (a cap, a scale, dropout, a cast, or an output that is no plain tensor)"
    elif seen[0][0].shape[:-1] != inputs.shape:
        why = f"its head takes {list(seen[0][0].shape)} for inputs {list(inputs.shape)}, not one position for each"
    if why:
        raise ConfigError(
            [
                Problem(
                    key="vocabulary_loss.mode",
                    why=f"{type(session.model).__name__} does not simply return what its head computes: {why}; the "
                    "loss taken from the head's input would be another one",
                    fix='vocabulary_loss = "whole"',
                )
            ]
        )
    hidden = seen[0][0]
    return hidden.shape, hidden.dtype


def _whole_is_better(
    session: Session, layer: nn.Linear, taken: tuple[torch.Size, torch.dtype], chunked: Run
) -> tuple[bool, str]:
    """Whether the plain loss is the faster one on the job's own shapes, and what was measured."""
    plain_loss = session.loss

    def whole(hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        return plain_loss(layer(hidden_BTD), targets_BT)

    with faked(session.model):
        whole_bytes, chunked_bytes = (_peak_bytes(session, layer, taken, run) for run in (whole, chunked))
    memory = f"{shown(abs(whole_bytes - chunked_bytes))} {'less' if chunked_bytes < whole_bytes else 'more'}"
    if isinstance(layer.weight, FakeTensor):
        return True, f"whole is assumed: which is faster is measured on real tensors only; chunked would need {memory}"
    free = free_bytes(session.device)
    if whole_bytes > free:
        return False, f"the whole loss needs {shown(whole_bytes)} of {shown(free)} free, so it was not timed"
    whole_s, chunked_s = _fastest_s(session, layer, taken, (whole, chunked))
    if chunked_s > whole_s * SLOWER:
        return True, f"whole: {whole_s:.2g} s against {chunked_s:.2g} s chunked; chunked would need {memory}"
    return False, f"{chunked_s:.2g} s against {whole_s:.2g} s whole, and {memory}"


def _forward_backward(session: Session, layer: nn.Linear, taken: tuple[torch.Size, torch.dtype], run: Run) -> None:
    """One loss and its gradients, which are thrown away; no parameter sees them."""
    shape, dtype = taken
    hidden = torch.zeros(shape, dtype=dtype, device=session.device, requires_grad=True)
    wanted = [hidden, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    with session.compute():
        loss = run(hidden, session.example().targets)
    torch.autograd.grad(loss, wanted)


def _peak_bytes(session: Session, layer: nn.Linear, taken: tuple[torch.Size, torch.dtype], run: Run) -> int:
    with Tracer(layer) as tracer:
        _forward_backward(session, layer, taken, run)
    return tracer.trace().peak_bytes


def _fastest_s(
    session: Session, layer: nn.Linear, taken: tuple[torch.Size, torch.dtype], runs: tuple[Run, Run]
) -> list[float]:
    """The shortest time of each, in turn, so that a machine whose speed drifts slows both alike."""
    times: list[list[float]] = [[], []]
    while len(times[0]) < 2 or (len(times[0]) < 5 and sum(map(sum, times)) < 2.0):
        for run, own in zip(runs, times, strict=True):
            own.append(seconds(partial(_forward_backward, session, layer, taken, run), session.device))
    return [min(own) for own in times]
