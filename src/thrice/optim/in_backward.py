"""Updates that run within backward: a hook on each parameter steps its own part of the optimizer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from thrice.optim.composite import Composite


class InBackward:
    """Takes each gradient when it is complete, keeps its norm, applies it and frees it."""

    def __init__(self) -> None:
        self.lr = 0.0
        """Of the step whose backward comes next."""
        self._norms: dict[Tensor, Tensor] = {}
        self._parameters: list[Tensor] = []

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is a Composite with one part for each trainable parameter of `model`."""
        assert isinstance(optimizer, Composite)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for part in optimizer.parts:
            (parameter,) = part.param_groups[0]["params"]
            # torch calls it once, when every use of the parameter has added its share: a tied weight too
            parameter.register_post_accumulate_grad_hook(partial(self._update, part))

    def _update(self, part: torch.optim.Optimizer, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._norms[parameter] = torch.linalg.vector_norm(parameter.grad)
        part.param_groups[0]["lr"] = self.lr
        part.step()
        parameter.grad = None

    def take_norm(self) -> Tensor:
        """Norm of the gradient that the last backward applied, in the model's order of parameters; then forgets it."""
        norms = [self._norms[parameter] for parameter in self._parameters if parameter in self._norms]
        self._norms.clear()
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
