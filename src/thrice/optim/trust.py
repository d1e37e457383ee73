"""What LAMB and LARS share: norms of whole tensors, and what has a trust ratio at all."""

from __future__ import annotations

import torch
from torch import Tensor


def norm(tensor: Tensor) -> Tensor:
    """Euclidean norm of a whole parameter, or of its update: a scalar on its device."""
    length: Tensor = torch.linalg.vector_norm(tensor)
    return length


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 1 where either is 0: such a tensor moves as if it had no trust ratio."""
    defined = (numerator > 0) & (denominator > 0)
    return torch.where(defined, numerator / denominator, torch.ones_like(numerator))


def scaled(parameter: Tensor) -> bool:
    """Whether a tensor has a trust ratio and decays: matrices do, biases, norms and other vectors do not."""
    return parameter.ndim >= 2
