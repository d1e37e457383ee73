"""What a result was measured on; it stands beside every result."""

from __future__ import annotations

import os
import platform
from datetime import date

import torch


def described() -> dict[str, object]:
    return {
        "date": date.today().isoformat(),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "bf16_instructions": torch.cpu._is_avx512_bf16_supported(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
