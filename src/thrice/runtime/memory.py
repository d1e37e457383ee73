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


def free_bytes(device: torch.device) -> int:
    """What the process could still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = total_bytes(device)
    free = _field_bytes("/proc/meminfo", "MemAvailable") or free
    # a container's own limit
    limit, used = (_read(f"/sys/fs/cgroup/memory.{what}").strip() for what in ("max", "current"))
    if limit.isdecimal() and used.isdecimal():
        free = min(free, int(limit) - int(used))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _field_bytes("/proc/self/status", "VmSize")
    if soft != resource.RLIM_INFINITY and taken is not None:
        free = min(free, soft - taken)
    return max(0, free)


def _field_bytes(path: str, field: str) -> int | None:
    """A figure of the system's, in bytes; None where it has none."""
    found = re.search(rf"{field}:\s*(\d+) kB", _read(path))
    return int(found[1]) * 1024 if found else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


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
    if device.type == "cuda" or soft == resource.RLIM_INFINITY or soft >= total or not _read("/proc/self/status"):
        return peak_bytes(device), total
    return _field_bytes("/proc/self/status", "VmPeak") or peak_bytes(device), soft
