"""One optimizer made of several: each has parameters of its own, and outside they look like one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class Composite(Optimizer):
    """Steps each of `parts`, in their order.

    Its `state` is theirs (one dict for all) and its `param_groups` are theirs (the same dicts): what is written
    into either reaches the part. A hook on its step runs around the step of each part, also where a part is
    stepped by itself.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            self.defaults |= part.defaults
        self._share({parameter: state for part in self.parts for parameter, state in part.state.items()})

    def _share(self, state: dict[torch.Tensor, Any]) -> None:
        self.state = defaultdict(dict, state)
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        return _register(hook, [part._optimizer_step_pre_hooks for part in self.parts])

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        return _register(hook, [part._optimizer_step_post_hooks for part in self.parts])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; each part sees what was loaded."""
        super().load_state_dict(state_dict)
        self._share(self.state)


def _register(hook: Any, places: list[Any]) -> RemovableHandle:
    handle = RemovableHandle(places[0], extra_dict=places[1:])
    for place in places:
        place[handle.id] = hook
    return handle
