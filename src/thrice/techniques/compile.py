"""torch.compile, block by block: one graph serves all blocks of a kind, so compile time does not grow with depth.

Fused kernels sum in another order and keep intermediate results in float32 that eager code rounds; random numbers
are drawn as eager code draws them. Evaluation stays eager: its shapes change from call to call, and each would be
compiled anew. See Ansel et al., "PyTorch 2", ASPLOS 2024.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from thrice.errors import Problem
from thrice.model.anatomy import blocks
from thrice.runtime.session import Session
from thrice.runtime.technique import Claim, Slot, Stage
from thrice.spec.job import Job


@final
@dataclass(frozen=True, kw_only=True)
class Compile:
    name: ClassVar[str] = "compile"
    stage: ClassVar[Stage] = Stage.COMPILE
    slot: ClassVar[Slot] = Slot.COMPILE

    mode: Literal["off", "blocks"] = "off"

    @classmethod
    def examples(cls) -> Iterable[Self]:
        yield cls(mode="blocks")

    def check(self) -> Iterator[Problem]:
        return iter(())

    def refuse(self, job: Job) -> Iterator[Problem]:
        return iter(())

    def apply(self, session: Session) -> str:
        if self.mode == "off":
            return "nothing is compiled"
        parts = blocks(session.model)
        if isinstance(next(session.model.parameters()), FakeTensor):
            return f"{len(parts)} blocks, rehearsed as they are before compilation"
        missing = _missing_compiler(session.device)
        if missing:
            return f"nothing is compiled: {missing}"
        for block in parts:
            _compile(block.module)
        return f"{len(parts)} blocks, compiled in the first step"

    def claim(self) -> Claim:
        return Claim.BITWISE if self.mode == "off" else Claim.ROUNDING

    def arithmetic(self) -> None:
        return None


def _missing_compiler(device: torch.device) -> str:
    """Why nothing can be compiled for the device; "" where it can."""
    if device.type != "cpu":
        return ""  # Triton brings its own
    # the one that torch's compiler would take; to ask torch itself costs three seconds of imports
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    remedy = "install one that works, or name yours in the environment variable CXX"
    if shutil.which(compiler) is None:
        return f"no C++ compiler {compiler!r} was found; {remedy}"
    # as the compiler of the blocks will be asked: a library against Python's headers, which may be missing too
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <vector>\n#include <Python.h>\n", encoding="utf-8")
        include = f"-I{sysconfig.get_path('include')}"
        command = [compiler, include, "-shared", "-fPIC", str(source), "-o", str(source.with_suffix(".so"))]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
            said = (
                ""
                if ended.returncode == 0
                else (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[0]
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
    return f"the C++ compiler {compiler!r} cannot build a library: {said}; {remedy}" if said else ""


def _compile(module: nn.Module) -> None:
    eager: Callable[..., Any] = module.forward
    # fallback_random: dropout draws the masks that eager code would draw
    compiled = torch.compile(eager, dynamic=False, options={"fallback_random": True})

    def forward(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs) if torch.is_grad_enabled() else eager(*args, **kwargs)

    module.forward = forward
