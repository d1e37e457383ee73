"""What one operator call costs, apart from the tensors it returns: FLOPs from its shapes, workspace measured.

FLOPs: a multiplication and an addition count as two. Only matrix products, convolutions and attention are
counted, by the formulas of `torch.utils.flop_counter`; element-wise operators, reductions, norms and
embeddings count 0. Attention counts the whole score matrix, also under a causal mask, and its backward counts
the scores it recomputes. Heads are the query's, however few key/value heads there are.

Workspace: scratch memory that a kernel takes and gives back by itself, such as operands cast to a common
dtype, or the fp32 sums of a bf16 product on a CPU without bf16 instructions. It depends on the machine and
has no formula, so it is read from the profiler while the operator runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import autograd
from torch.utils import flop_counter

aten = torch.ops.aten


def _matrix_vector(matrix: torch.Tensor) -> int:
    return 2 * matrix.numel()


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    count: int = flop_counter.sdpa_flop_count(  # type: ignore[no-untyped-call]
        query.shape, key.shape, value.shape
    )
    return count


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    count: int = flop_counter.sdpa_backward_flop_count(  # type: ignore[no-untyped-call]
        gradient.shape, query.shape, key.shape, value.shape
    )
    return count


def _product(_: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *__: Any, **___: Any) -> int:
    return 2 * left.numel() * right.shape[1]


# What torch's registry lacks: attention on a CPU, products with a vector, and one that adds in place.
_MISSING: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.addmm_: _product,
    aten.mv: lambda matrix, *_, **__: _matrix_vector(matrix),
    aten.addmv: lambda _, matrix, *__, **___: _matrix_vector(matrix),
    aten.dot: lambda vector, *_, **__: _matrix_vector(vector),
}


def operator_flops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """FLOPs of the call `operator(*args, **kwargs) -> output`; `operator` is an overload of torch.ops."""
    packet = operator._overloadpacket
    missing = _MISSING.get(packet)
    if missing is not None:
        return missing(*args, **kwargs)
    known = flop_counter.flop_registry.get(packet)
    return int(known(*args, **kwargs, out_val=output)) if known is not None else 0


def call_signature(operator: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What the workspace of a call depends on: shapes, strides, dtypes, devices and options, no values."""
    return str(operator), _shape(args), _shape(kwargs)


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return tuple(value.shape), strides, value.dtype, value.device.type
    if isinstance(value, (list, tuple)):
        return tuple(_shape(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _shape(item)) for key, item in value.items())
    return value if isinstance(value, (bool, int, str, torch.dtype)) else type(value)


# State, then: record shapes, profile memory, stacks, FLOPs, modules.
_MEMORY_ONLY = autograd.ProfilerConfig(  # type: ignore[attr-defined]
    autograd.ProfilerState.CPU,  # type: ignore[attr-defined]
    False,
    True,
    False,
    False,
    False,
    torch._C._profiler._ExperimentalConfig(),
)


def run_measured(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int | None]:
    """The output of the call, and the most bytes it held beyond what it left behind.

    None where another profiler is at work on this thread, which leaves no room to measure.
    """
    if autograd._profiler_enabled():  # type: ignore[attr-defined]
        return operator(*args, **kwargs), None
    autograd._enable_profiler_legacy(_MEMORY_ONLY)  # type: ignore[attr-defined]
    try:
        output = operator(*args, **kwargs)
    finally:
        threads = autograd._disable_profiler_legacy()  # type: ignore[attr-defined]
    held = most = 0
    for event in (event for events in threads for event in events if str(event.kind()) == "memory_alloc"):
        held += event.cpu_memory_usage() + event.cuda_memory_usage()
        most = max(most, held)
    return output, most - max(held, 0)
