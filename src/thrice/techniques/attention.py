"""Which attention runs: torch's fused kernels, ours block by block, or the whole score matrix.

Ours is model/flash.py (arXiv:2205.14135, 2307.08691); all three compute the same. On the built-in decoder its
attention holds the function that it calls. On any other model `F.scaled_dot_product_attention` is exchanged
globally, but only while a module of that model that calls it runs: so it holds when recomputation runs the forward
again within backward, and no other model in the process sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ClassVar, Literal, Self, final

from torch import nn
from torch.nn import functional as F

from thrice.errors import ConfigError, Problem
from thrice.model import decoder
from thrice.model.attention import Kernel, eager_attention
from thrice.model.flash import BLOCK, flash_attention
from thrice.runtime.fakes import faked
from thrice.runtime.session import Session
from thrice.runtime.technique import Claim, Slot, Stage
from thrice.spec.job import Job, at_least


@final
@dataclass(frozen=True, kw_only=True)
class Attention:
    name: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.LAYERS
    slot: ClassVar[Slot] = Slot.ATTENTION

    kernel: Literal["sdpa", "flash", "eager"] = "sdpa"
    """`sdpa`: torch's fused kernels. `flash`: ours, block by block, in plain tensor operations. `eager`: the whole
    score matrix."""
    block: int | None = None
    """flash: queries and keys in a block; 256 where not given."""

    @classmethod
    def examples(cls) -> Iterable[Self]:
        yield cls(kernel="sdpa")
        yield cls(kernel="flash", block=20)
        yield cls(kernel="eager")

    def check(self) -> Iterator[Problem]:
        yield from at_least(1, block=self.block)
        if self.block is not None and self.kernel != "flash":
            yield Problem(
                key="block",
                value=self.block,
                why=f'it belongs to kernel = "flash", and the kernel is "{self.kernel}"',
                fix='leave it out, or set kernel = "flash"',
            )

    def refuse(self, job: Job) -> Iterator[Problem]:
        return iter(())

    def apply(self, session: Session) -> str:
        if self.kernel == "sdpa":
            return "torch's fused kernels"
        block = self.block or BLOCK
        kernel: Kernel = partial(flash_attention, block=block) if self.kernel == "flash" else eager_attention
        what = f"ours in blocks of {block}" if self.kernel == "flash" else "the whole score matrix"
        ours = [module for module in session.model.modules() if isinstance(module, decoder.Attention)]
        for attention in ours:
            attention.kernel = kernel
        callers = [] if ours else self._callers(session, kernel)
        for module in callers:
            _exchange(module, kernel)
        return f"{what}, in {len(ours or callers)} attentions"

    def claim(self) -> Claim:
        return Claim.BITWISE if self.kernel == "sdpa" else Claim.ROUNDING

    def arithmetic(self) -> None:
        return None

    def _callers(self, session: Session, kernel: Kernel) -> list[nn.Module]:
        """The modules whose own forward calls torch's attention, found by running the model on fake tensors."""
        running: list[nn.Module] = []
        found: dict[nn.Module, None] = {}

        def noted(*args: Any, **kwargs: Any) -> Any:
            found[running[-1]] = None
            return kernel(*args, **kwargs)

        with faked(session.model):
            for module in session.model.modules():
                _push(module, running)
            with session.compute(), _in_force(noted):
                session.model(session.example().inputs)
        if not found:
            raise ConfigError(
                [
                    Problem(
                        key="attention.kernel",
                        value=self.kernel,
                        why=f"{type(session.model).__name__} never calls F.scaled_dot_product_attention of torch.nn, "
                        "so there is nothing to exchange",
                        fix='build it with torch\'s attention (Hugging Face: attn_implementation="sdpa"; '
                        "nn.MultiheadAttention: need_weights=False), or leave attention out",
                    )
                ]
            )
        return list(found)


def _push(module: nn.Module, running: list[nn.Module]) -> None:
    """Keeps `module` last in `running` while its forward runs."""
    forward: Callable[..., Any] = module.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        running.append(module)
        try:
            return forward(*args, **kwargs)
        finally:
            running.pop()

    module.forward = watched


def _exchange(module: nn.Module, kernel: Kernel) -> None:
    """The module's forward finds `kernel` in the place of torch's attention."""
    forward: Callable[..., Any] = module.forward

    @wraps(forward)
    def exchanged(*args: Any, **kwargs: Any) -> Any:
        with _in_force(kernel):
            return forward(*args, **kwargs)

    module.forward = exchanged


@contextmanager
def _in_force(kernel: Kernel) -> Iterator[None]:
    # torch's name and no TorchFunctionMode: that one is lost where checkpointing runs a forward again
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = kernel
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
