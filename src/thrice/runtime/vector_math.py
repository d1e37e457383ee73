"""Makes the first call of each of MKL's vector functions on one thread.

MKL chooses a function's kernel on its first call. Where two threads make that call together, one of them may run a
kernel of far lower accuracy over its part of the tensor, once and in silence (oneMKL 2024.2, which PyTorch's CPU
builds carry; pytorch/pytorch#188792): a rotary table wrong in its fourth digit, and so the whole run that uses it.
"""

from __future__ import annotations

import torch

FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "lgamma"),
    *("log", "log10", "log1p", "log2", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh"),
)


def settle_vector_math() -> None:
    """Calls each function on one element, which no second thread shares. Before any other work of the process."""
    for dtype in (torch.float32, torch.float64):
        for name in FUNCTIONS:
            getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype, device="cpu"))
