"""What autograd's engine does, as seen from inside a dispatch mode.

The engine adds up the gradients of a tensor that was used twice. It adds in place where nothing else holds
the first of them (torch/csrc/autograd/input_buffer.cpp), but never while a dispatch mode is on or on tensor
subclasses such as fake tensors. A trace has to tell which of the sums it sees would have made no new tensor.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode

_WRAPPERS = ("torch._compile", "torch._dynamo.eval_frame")  # they surround every __torch_dispatch__

Caller = Literal["program", "engine", "recomputation", "function"]


def caller() -> Caller:
    """Who called the operator that a mode's `__torch_dispatch__`, our own caller, is handling.

    Outside a backward it is the "program". Inside one it is the "engine" itself, activation checkpointing's
    "recomputation", or another Python "function", such as a hook or a custom backward.
    """
    if torch._C._current_graph_task_id() == -1:
        return "program"
    direct = True
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not graph._engine_run_backward.__code__:
        module = frame.f_globals.get("__name__")
        if module == "torch.utils.checkpoint":
            return "recomputation"
        direct = direct and module in _WRAPPERS
        frame = frame.f_back  # type: ignore[assignment]
    return "engine" if direct else "function"


def sums_in_place(operator: Any, args: tuple[Any, ...], sole_owner: tuple[int, ...]) -> bool:
    """Whether the engine, which called the operator, would do it in place if no dispatch mode were on.

    Meant to be called by `__torch_dispatch__` itself; `sole_owner` is what `sole_owner_counts` returned.
    A sum into a view never is: the view keeps its base, so their storage has two holders. A derivative formula
    in C++ that adds two tensors looks the same and is taken for such a sum; no common operator has one.
    """
    return (
        operator is torch.ops.aten.add.Tensor
        and isinstance(args[1], torch.Tensor)
        and not torch.is_grad_enabled()
        and _use_counts(args[0]) == sole_owner
    )


def _use_counts(tensor: torch.Tensor) -> tuple[int, ...]:
    """How often a tensor, its storage and its Python object are held."""
    storage = tensor.untyped_storage()
    storage_count = torch._C._storage_Use_Count(storage._cdata)
    tensor_count: int = tensor._use_count()  # type: ignore[attr-defined]
    return tensor_count, storage_count, sys.getrefcount(tensor)


class _SumProbe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    counts: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.counts = _use_counts(args[0])
        return func(*args, **(kwargs or {}))


def sole_owner_counts() -> tuple[int, ...]:
    """The counts, seen from `__torch_dispatch__`, of a gradient that only the engine holds: by making one."""
    probe = _SumProbe()  # type: ignore[no-untyped-call]
    with torch.enable_grad(), probe:
        leaf = torch.ones(2, requires_grad=True)
        (leaf * 2 + leaf * 3).sum().backward()  # type: ignore[no-untyped-call]
    return probe.counts
