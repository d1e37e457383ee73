"""ZeRO (Rajbhandari et al., arXiv:1910.02054): replicas that divide among them what each would hold again.

Level 1: every rank has the whole parameters and the gradient of its own share of the data; the states of the optimizer
are cut in equal shards. In the last backward of a step each gradient is added up over all ranks and ends at the rank
that has its piece, which updates that piece alone; then all gather the parameters. What is sent is what an all-reduce
sends, and states take 1/N of their bytes.

Level 2: gradients are divided too. Each micro-batch's are sent to their owners and freed as backward completes them,
so that whole gradients never exist at once; a step of k micro-batches sends k times the gradients. Level 1 adds up
whole gradients over a step, and sends them once; with one micro-batch a step the two are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, final

from thrice.errors import ConfigError, Problem
from thrice.runtime.flat_shards import FlatShards
from thrice.runtime.replicas import BUCKET_BYTES, share_weights
from thrice.runtime.session import Session
from thrice.runtime.technique import Claim, Slot, Stage
from thrice.spec.job import Job, positive


@final
@dataclass(frozen=True, kw_only=True)
class ZeroStage:
    name: ClassVar[str] = "zero_stage"
    stage: ClassVar[Stage] = Stage.SHARD
    slot: ClassVar[Slot] = Slot.SHARD

    level: Literal[0, 1, 2, 3] = 0
    """0: plain replicas. 1: the optimizer's states are divided. 2: and gradients, which are sent every micro-batch."""
    bucket_bytes: int = BUCKET_BYTES
    """Of gradients that travel together: more is less latency, less is more overlap with backward."""

    @classmethod
    def examples(cls) -> Iterable[Self]:
        yield cls(level=1)
        yield cls(level=2)

    def check(self) -> Iterator[Problem]:
        yield from positive(bucket_bytes=self.bucket_bytes)
        if self.level > 2:
            yield Problem(key="level", value=self.level, why="this version has 0, 1 and 2", fix="zero_stage = 2")

    def refuse(self, job: Job) -> Iterator[Problem]:
        if self.level == 0 or job.mesh().data_parallel == 1:
            return
        if any(a.reduced is not None for t in job.techniques if (a := t.arithmetic()) is not None):
            yield Problem(
                key=self.name,
                value=self.level,
                why="gradients that are divided travel as they are, not compressed",
                fix='data_parallel.compression = "none", or leave zero_stage out',
            )
        if job.optimizer.name == "muon":
            yield Problem(
                key=self.name,
                value=self.level,
                why="Muon makes the singular values of a whole matrix alike, and a rank has pieces of matrices",
                fix='optimizer.name = "adamw", or leave zero_stage out',
            )

    def apply(self, session: Session) -> str:
        if self.level == 0:
            return "off: states are whole on every rank"
        world, shares = session.world, session.ledger.data_parallel
        if world.size == 1:
            return "one process, nothing to divide" if shares == 1 else f"one of {shares} shares, not divided"
        share_weights(session.model, world)
        shards = FlatShards(session, self.bucket_bytes, every=self.level == 2)
        if not all(world.gather(bool(shards.share.pieces))):
            raise ConfigError(
                [
                    Problem(
                        key=self.name,
                        value=self.level,
                        why=f"the trainable parameters are too few for {world.size} processes: one would have none",
                        fix="leave zero_stage out",
                    )
                ]
            )
        session.replicas = session.shards = shards
        own, whole = (
            sum(tensor.numel() for tensor in tensors)
            for tensors in (shards.share.pieces, (p for p in session.model.parameters() if p.requires_grad))
        )
        return (
            f"the optimizer updates {own:,} of {whole:,} elements on rank {world.rank} of {world.size}; gradients go "
            f"to their owners within {'the last' if self.level == 1 else 'each'} backward of a step, in "
            f"{len(shards.buckets)} bucket{'s' if len(shards.buckets) > 1 else ''} of up to {self.bucket_bytes:,} bytes"
        )

    def claim(self) -> Claim:
        return Claim.ROUNDING if self.level else Claim.BITWISE

    def arithmetic(self) -> None:
        return None
