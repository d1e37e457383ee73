"""What memory a process uses, as the operating system or the accelerator counts it."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path

import torch


def peak_bytes(device: torch.device) -> int:
    """The most that was used so far: resident memory on a CPU, allocated tensors on an accelerator."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def total_bytes(device: torch.device) -> int:
    """What the device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def shown(count_bytes: float) -> str:
    """A number of bytes as people read it: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count_bytes) < 1024:
            return f"{count_bytes:.4g} {unit}"
        count_bytes /= 1024
    return f"{count_bytes:.4g} TiB"


def used_of(device: torch.device) -> tuple[int, int]:
    """(the most that was used so far, what the process may have), both counted in the same way.

    Where the system limits the process's addresses (ulimit -v), it is addresses that run out.
    """
    total = total_bytes(device)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/status")
    if device.type == "cuda" or soft == resource.RLIM_INFINITY or soft >= total or not status.exists():
        return peak_bytes(device), total
    peak = re.search(r"VmPeak:\s*(\d+) kB", status.read_text())
    return int(peak[1]) * 1024 if peak else peak_bytes(device), soft
