"""How long something takes on a device, its queue of kernels included."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds(act: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    act()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began
