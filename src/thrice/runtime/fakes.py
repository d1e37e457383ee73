"""A model on fake tensors for a while: its code runs, and nothing is computed or allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def faked(model: nn.Module) -> Iterator[None]:
    """Within it every parameter and buffer of `model` is a fake one of the same shape, ties kept.

    What is made in it is fake too. Afterwards the model has its own tensors back, gradients included, and each
    module the `forward` it had: what was patched in between is gone.
    """
    with ExitStack() as stack:
        mode = torch._guards.detect_fake_mode(list(model.parameters()))
        if mode is None:  # in a rehearsal it is there already
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stand_ins: dict[int, Tensor] = {}
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for own in tables:
                for name, tensor in own.items():
                    if tensor is not None:
                        own[name] = stand_ins.setdefault(id(tensor), _like(tensor))
                        stack.callback(own.__setitem__, name, tensor)
            patched = module.__dict__.get("forward")
            stack.callback(restore_forward, module, patched)
        yield


def _like(tensor: Tensor) -> Tensor:
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if not isinstance(tensor, nn.Parameter):
        return fake
    parameter = nn.Parameter(fake, requires_grad=tensor.requires_grad)
    if tensor.requires_grad:
        parameter.grad_dtype = tensor.grad_dtype
    return parameter


def restore_forward(module: nn.Module, patched: object) -> None:
    """Gives the module the instance's `forward` it had, or its class's where that was None."""
    module.__dict__.pop("forward", None)
    if patched is not None:
        module.__dict__["forward"] = patched
