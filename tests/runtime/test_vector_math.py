"""The race itself shows once in thousands of starts; what is tested is that no first call can have company."""

from __future__ import annotations

import subprocess
import sys

from thrice.runtime.vector_math import FUNCTIONS

FIRST_CALLS = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

first = {}

class Noted(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            first.setdefault((func.overloadpacket.__name__, args[0].dtype), args[0].numel())
        return func(*args, **(kwargs or {}))

with Noted():
    import thrice
    from thrice.compose import build_model
    build_model(thrice.Job(), 256, torch.device("cpu"))
for (name, dtype), count in first.items():
    print(name, dtype, count)
"""


def test_first_call_of_each_vector_function_is_on_one_element():
    out = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, check=True).stdout
    first = {(name, dtype): int(count) for name, dtype, count in map(str.split, out.splitlines())}
    for name in FUNCTIONS:
        for dtype in ("torch.float32", "torch.float64"):
            assert first[name, dtype] == 1, (name, dtype)
