"""Bytes and FLOPs of one training step: every tensor storage from birth to death, every operator once.

The tracer sits below autograd, so it sees each operator that runs: forward, backward, recomputation,
optimizer. It works the same on real tensors and under `FakeTensorMode(allow_non_fake_inputs=True)`, where
nothing is computed: build model, optimizer and batch inside that mode, then enter the tracer inside it too.

Bytes are those the step holds without a tracer, as PyTorch's own profiler counts them (not the rounding of an
allocator). What an operator does not show is put right: sums of gradients that autograd would do in place
(engine.py), workspaces (operators.py), and storages that are resized or made outside any operator.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby
from types import TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from thrice.observe.engine import Caller, caller, sole_owner_counts, sums_in_place
from thrice.observe.operators import call_signature, operator_flops, run_measured

PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
OPTIMIZER_STATES = "optimizer_states"
ACTIVATIONS = "activations"
INPUTS = "inputs"
TEMPORARY = "temporary"
CATEGORIES = (PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATES, ACTIVATIONS, INPUTS, TEMPORARY)

FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTE = "recompute"
OPTIMIZER = "optimizer"
PHASES = (FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER)

_TIMELINE_POINTS = 1000


@dataclass(frozen=True, kw_only=True)
class Operator:
    """All calls of one operator."""

    count: int
    output_bytes: int
    """Bytes of the storages it made; views and in-place results make none."""
    flops: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is alive after one birth or death of a storage."""

    event: int
    phase: str
    bytes: dict[str, int]
    """By category."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One step, as followed by a Tracer.

    Categories: `parameters` and `buffers` are the model's; `gradients` were some parameter's `.grad`;
    `optimizer_states` are held by the optimizer; `activations` were made by a forward, or by a recomputation,
    and outlived it into the backward (autocast's casts of weights too); `inputs` were made out of sight, like
    the batch, and count from the start; `temporary` is the rest.
    Phases: `recompute` is what checkpointing computes again inside a backward; `forward` is whatever is
    neither backward nor optimizer.
    """

    peak_bytes: int
    """The most bytes alive at once, static ones included."""
    at_peak: dict[str, int]
    """Bytes by category; they add up to `peak_bytes`."""
    at_end: dict[str, int]
    """Bytes by category when the trace ended."""
    timeline: tuple[Point, ...]
    """At most about a thousand points, each the highest of its stretch; the peak is one of them."""
    flops_by_phase: dict[str, int]
    operators: dict[str, Operator]

    @property
    def flops(self) -> int:
        return sum(self.flops_by_phase.values())

    @property
    def flops_by_operator(self) -> dict[str, int]:
        return {name: operator.flops for name, operator in self.operators.items() if operator.flops}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Storage:
    """One storage of the untraced step; with a second holder where a sum in place was seen as two tensors."""

    __slots__ = ("category", "holders", "nbytes")

    def __init__(self, nbytes: int, category: str) -> None:
        self.nbytes = nbytes
        self.category = category
        self.holders = 1


class Tracer(TorchDispatchMode):
    """Follows what runs inside `with tracer:`; any number of forwards, backwards and optimizer steps.

    `tracer.live_bytes()` and `tracer.flops` may be read at any moment in between. A tracer serves once.

    `workspaces` maps a call's signature to the bytes its kernel takes beside its result. On real tensors each
    new signature is measured and added, at about a millisecond; under fake tensors nothing can be measured,
    and a signature that is not there counts 0. Hand the `tracer.workspaces` of a real trace to a fake one to
    have them equal to the byte.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *optimizers: torch.optim.Optimizer,
        workspaces: dict[tuple[Any, ...], int] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.workspaces = {} if workspaces is None else workspaces
        self._fake = False
        self._sole_owner: tuple[int, ...] = ()
        self._live_bytes = 0
        self._model = model
        self._optimizers = optimizers
        self._phase = FORWARD
        self._stepping = False
        self._events: list[tuple[str, _Storage, int]] = []  # phase, what, change of bytes
        self._given: list[tuple[str, _Storage, int]] = []  # what must have been there before the first event
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Storage]] = {}
        self._fresh: set[_Storage] = set()  # born in a forward or recomputation whose backward has not begun
        self._flops_by_phase = dict.fromkeys(PHASES, 0)
        self._operators: dict[str, list[int]] = {}  # count, output bytes, FLOPs
        self._undo: list[Callable[[], None]] = []

    def live_bytes(self) -> int:
        """Bytes of every storage alive now, static ones included."""
        return self._live_bytes

    def trace(self) -> Trace:
        """What was seen; call it after the `with`."""
        history = self._given + self._events
        first = max(0, len(self._given) - 1)
        totals = list(accumulate(change for _, _, change in history))
        length = -(-len(totals) // _TIMELINE_POINTS) or 1
        stretches = groupby(range(len(totals)), key=lambda event: (event // length, history[event][0]))
        highest = {max(events, key=totals.__getitem__) for _, events in stretches}
        live = dict.fromkeys(CATEGORIES, 0)
        timeline = []
        for event, (phase, storage, change) in enumerate(history):
            live[storage.category] += change
            # what was there before is one point, the first
            if event >= first and (event in highest or event in (first, len(totals) - 1)):
                timeline.append(Point(event=event, phase=phase, bytes=dict(live)))
        peak = max(timeline, key=lambda point: totals[point.event])
        return Trace(
            peak_bytes=totals[peak.event],
            at_peak=peak.bytes,
            at_end=live,
            timeline=tuple(timeline),
            flops_by_phase=dict(self._flops_by_phase),
            operators={
                str(packet): Operator(count=count, output_bytes=output_bytes, flops=flops)
                for packet, (count, output_bytes, flops) in self._operators.items()
            },
        )

    def __enter__(self) -> Tracer:
        self._sole_owner = sole_owner_counts()
        self._fake = isinstance(torch.empty(0), FakeTensor)
        self._claim_static()
        self._given, self._events = self._events, []
        self._add_hooks()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, where)  # type: ignore[no-untyped-call]
        self._claim_static()
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._alive.clear()
        self._fresh.clear()

    def _claim_static(self) -> None:
        for parameter in self._model.parameters():
            self._claim(parameter, PARAMETERS)
            if parameter.grad is not None:
                self._claim(parameter.grad, GRADIENTS)
        for buffer in self._model.buffers():
            self._claim(buffer, BUFFERS)
        for optimizer in self._optimizers:
            for state in tree_iter(list(optimizer.state.values())):
                if isinstance(state, torch.Tensor):
                    self._claim(state, OPTIMIZER_STATES)

    def _add_hooks(self) -> None:
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                self._undo.append(hook.remove)
        for optimizer in self._optimizers:
            self._undo.append(optimizer.register_step_pre_hook(self._before_step).remove)
            self._undo.append(optimizer.register_step_post_hook(self._after_step).remove)
        # What no operator shows: FSDP frees and fills parameters, checkpointing keeps the random state.
        self._patch(torch.UntypedStorage, "resize_", lambda resized: resized)
        self._patch(torch, "get_rng_state", lambda state: state.untyped_storage())

    def _patch(self, owner: Any, name: str, storage_of: Callable[[Any], torch.UntypedStorage]) -> None:
        """Follow the storage in the result of `owner.name`, until the trace ends."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def followed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._follow(storage_of(result), TEMPORARY)
            return result

        setattr(owner, name, followed)
        self._undo.append(lambda: setattr(owner, name, original))

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._claim(parameter.grad, GRADIENTS)

    def _before_step(self, *_: object) -> None:
        self._claim_static()
        self._stepping = True

    def _after_step(self, *_: object) -> None:
        self._stepping = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a fake tensor is asked for its device
            return func(*args, **kwargs)
        called_by = caller()
        self._enter_phase(called_by)
        if func is not torch.ops.aten.lift_fresh.default:  # what torch.tensor() makes in the step is no input
            for tensor in _tensors((args, kwargs)):
                self._follow(tensor.untyped_storage(), INPUTS)
        in_place = called_by == "engine" and sums_in_place(func, args, self._sole_owner)
        output, workspace_bytes = self._run(func, args, kwargs)
        if in_place:
            self._take_over(args[0].untyped_storage(), output.untyped_storage())
        output_bytes = sum(self._follow(tensor.untyped_storage(), TEMPORARY) for tensor in _tensors(output))
        if workspace_bytes:
            workspace = _Storage(workspace_bytes, TEMPORARY)
            self._book(workspace, workspace_bytes)
            self._book(workspace, -workspace_bytes)
        self._count(func, args, kwargs, output, output_bytes)
        return output

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """The output of an operator and its workspace in bytes."""
        signature = call_signature(func, args, kwargs)
        if self._fake or signature in self.workspaces:
            return func(*args, **kwargs), self.workspaces.get(signature, 0)
        output, workspace_bytes = run_measured(func, args, kwargs)
        if workspace_bytes is not None:
            self.workspaces[signature] = workspace_bytes
        return output, workspace_bytes or 0

    def _enter_phase(self, called_by: Caller) -> None:
        if self._stepping:
            phase = OPTIMIZER
        elif called_by == "program":
            phase = FORWARD
        else:
            phase = RECOMPUTE if called_by == "recomputation" else BACKWARD
        if phase == BACKWARD and self._fresh:
            for storage in self._fresh:
                if storage.category == TEMPORARY:
                    storage.category = ACTIVATIONS
            self._fresh.clear()
        self._phase = phase

    def _count(self, func: Any, args: Any, kwargs: Any, output: Any, output_bytes: int) -> None:
        flops = operator_flops(func, args, kwargs, output)
        self.flops += flops
        self._flops_by_phase[self._phase] += flops
        total = self._operators.setdefault(func._overloadpacket, [0, 0, 0])
        total[0] += 1
        total[1] += output_bytes
        total[2] += flops

    def _claim(self, tensor: torch.Tensor, category: str) -> None:
        for part in _tensors(tensor):
            self._follow(part.untyped_storage(), category)
            storage = self._alive[part.untyped_storage()._cdata][1]
            if storage.category in (ACTIVATIONS, INPUTS, TEMPORARY):
                storage.category = category

    def _follow(self, untyped: torch.UntypedStorage, category: str) -> int:
        """Book a storage that is new, or that was resized; returns the bytes of a new one."""
        key, nbytes = untyped._cdata, untyped.nbytes()
        if key not in self._alive:
            storage = _Storage(nbytes, category)
            self._watch(untyped, storage)
            self._book(storage, nbytes, self._given if category == INPUTS else self._events)
            if category == TEMPORARY and self._phase in (FORWARD, RECOMPUTE):
                self._fresh.add(storage)
            return nbytes
        storage = self._alive[key][1]
        if storage.nbytes != nbytes and storage.holders == 1:
            self._book(storage, nbytes - storage.nbytes)
            storage.nbytes = nbytes
        return 0

    def _take_over(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        storage = self._alive[old._cdata][1]
        storage.holders += 1
        self._watch(new, storage)

    def _watch(self, untyped: torch.UntypedStorage, storage: _Storage) -> None:
        key = untyped._cdata
        self._alive[key] = weakref.ref(untyped, lambda _: self._died(key)), storage

    def _died(self, key: int) -> None:
        _, storage = self._alive.pop(key)
        storage.holders -= 1
        if not storage.holders:
            self._book(storage, -storage.nbytes)
            self._fresh.discard(storage)

    def _book(self, storage: _Storage, change: int, events: list[tuple[str, _Storage, int]] | None = None) -> None:
        self._live_bytes += change
        (self._events if events is None else events).append((self._phase, storage, change))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Every dense tensor in an operator's arguments or results."""
    if isinstance(values, torch.Tensor):
        if values.layout is torch.strided:
            yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
