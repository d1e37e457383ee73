"""Memory and time of one attention against the length of the sequence, for each kernel.

One causal attention, forward and backward, one head of 64 channels, float32. Bytes are the peak of its trace on real
tensors, kernels' scratch memory included, less the inputs and their gradients: what the attention itself takes. The
exponent is the slope of log bytes over log tokens. All kernels are compared with torch's on the same values.

    OMP_NUM_THREADS=1 python benchmarks/attention.py    # about three minutes; writes attention.json beside this file
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thrice.model.attention import Kernel, eager_attention
from thrice.model.flash import BLOCK, flash_attention
from thrice.observe.trace import Tracer

TOKENS = (1024, 2048, 4096, 8192, 16384)
CHANNELS = 64
KERNELS: dict[str, Kernel] = {
    "sdpa": F.scaled_dot_product_attention,
    "flash": flash_attention,
    "eager": eager_attention,
}
BLOCKS = (64, 128, 256, 512, 1024)
"""Compared at 4,096 tokens."""


def inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, tokens, CHANNELS, generator=generator).requires_grad_() for _ in range(3)]


def forward_backward(kernel: Kernel, given: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    out = kernel(*given, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]


def measure(kernel: Kernel, tokens: int) -> tuple[dict[str, float], list[Tensor]]:
    given = inputs(tokens)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        results = forward_backward(kernel, given)
        times.append(time.perf_counter() - began)
    with Tracer(nn.Module()) as tracer:
        forward_backward(kernel, given)
    trace = tracer.trace()
    own_bytes = trace.peak_bytes - 2 * sum(tensor.nbytes for tensor in given)
    return {"own_peak_bytes": own_bytes, "seconds": round(min(times), 4), "flops": trace.flops}, results


def exponent(own_peak_bytes: list[float]) -> float:
    """The least-squares slope of log bytes over log tokens."""
    xs, ys = [math.log(tokens) for tokens in TOKENS], [math.log(size) for size in own_peak_bytes]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def main() -> None:
    rows = []
    for tokens in TOKENS:
        expected: list[Tensor] = []
        for name, kernel in KERNELS.items():
            row, results = measure(kernel, tokens)
            expected = expected or results
            pairs = zip(results, expected, strict=True)
            furthest = max(float((got - right).norm() / right.norm()) for got, right in pairs)
            rows.append({"kernel": name, "tokens": tokens, **row, "furthest_from_sdpa": furthest})
            print(json.dumps(rows[-1]), flush=True)
    exponents = {
        name: round(exponent([row["own_peak_bytes"] for row in rows if row["kernel"] == name]), 3) for name in KERNELS
    }
    blocks = {block: measure(partial(flash_attention, block=block), 4096)[0] for block in BLOCKS}
    result = {
        "date": date.today().isoformat(),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "channels": CHANNELS,
        "block": BLOCK,
        "exponents": exponents,
        "rows": rows,
        "flash_blocks_at_4096_tokens": blocks,
    }
    print(json.dumps({"exponents": exponents, "blocks": blocks}))
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
