"""Parameters laid end to end in flat buckets, each cut in equal shards, one for every rank.

A parameter stays what it was, by name and shape: a view of its bucket. What a rank's optimizer updates are the pieces
of parameters that lie in its shards. In the last backward of a window, or in each, a bucket's gradients are added up
and scattered as soon as they are complete, while backward goes on; after the update one gather a bucket makes
parameters whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thrice.optim.blockwise import BLOCK
from thrice.optim.share import Piece, Share
from thrice.optim.stored import stored_format
from thrice.runtime.dist import World
from thrice.runtime.replicas import Named, filled
from thrice.runtime.session import Session

# torch 2.13 gave both a new name
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

UNDERWAY = 2
"""Buckets of gradients that are on their way at once; their memory is bounded, and the next is filled meanwhile."""


class FlatShards:
    """Replicas whose gradients end up in shards, and whose optimizers share the update.

    With `every` the gradients of each micro-batch are sent, and only shards are added up over a window; otherwise those
    of the window are added up whole, and sent once.
    """

    def __init__(self, session: Session, bucket_bytes: int, *, every: bool) -> None:
        self._world, self._every = session.world, every
        self.loss = session.unwatched
        trainable = [(name, p) for name, p in session.model.named_parameters() if p.requires_grad]
        self._shapes = {name: parameter.shape for name, parameter in trainable}
        # the order in which gradients are complete, about
        self.buckets = [Bucket(named, self._world) for named in filled(reversed(trainable), bucket_bytes)]
        self.share = Share(
            pieces={tensor: piece for bucket in self.buckets for tensor, piece in bucket.own.items()},
            matrices=tuple(name for name, shape in self._shapes.items() if len(shape) >= 2),
            sum_=self._world.sum_,
        )
        self._sends = False
        """Whether the backward that runs is one whose gradients are sent."""
        self._sent = 0
        """Buckets that it has sent."""
        self._waiting: set[Tensor] = set()
        """Parameters whose gradient is not complete in it."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._complete)  # type: ignore[no-untyped-call]

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return self._exchanging(last=last) if last or self._every else nullcontext()

    @contextmanager
    def _exchanging(self, *, last: bool) -> Iterator[None]:
        self._waiting = {parameter for bucket in self.buckets for parameter in bucket.parameters}
        self._sent, self._sends = 0, True
        try:
            yield
        finally:
            self._sends = False
        self._send(everything=True)
        for bucket in self.buckets:
            bucket.land()
        if last:
            # what this rank did not use in its share of the window, others may have
            flags = [float(each) for bucket in self.buckets for each in bucket.used]
            users = iter(self._world.sum_(torch.tensor(flags, device=self._world.device)).tolist())
            for bucket in self.buckets:
                bucket.hand_over([next(users) > 0 for _ in bucket.parameters])

    def _complete(self, parameter: Tensor) -> None:
        if self._sends:
            self._waiting.discard(parameter)
            self._send()

    def _send(self, *, everything: bool = False) -> None:
        """Buckets go in their order, which is the same on all ranks."""
        while self._sent < len(self.buckets):
            bucket = self.buckets[self._sent]
            if not everything and any(parameter in self._waiting for parameter in bucket.parameters):
                break
            if self._sent >= UNDERWAY:
                self.buckets[self._sent - UNDERWAY].land()
            bucket.send()
            self._sent += 1

    def updated(self) -> None:
        """Makes parameters whole after an update of their pieces. Collective."""
        for work in [bucket.gather() for bucket in self.buckets]:
            work.wait()

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on rank 0, out of each rank's for its pieces; nothing on the others. Collective.

        A name is a parameter's, or "parameter:state" for one of its states.
        """
        world = self._world
        kinds = world.gather({n: (t.numel(), t.dtype, t.device.type) for n, t in tensors.items()})
        order = {parameter: place for place, parameter in enumerate(self._shapes)}
        names = sorted(dict.fromkeys(n for of_rank in kinds for n in of_rank), key=lambda n: order[_split(n)[0]])
        whole = {}
        for name in names:
            parts = []
            for rank, of_rank in enumerate(kinds):
                if name not in of_rank:
                    continue
                if rank == world.rank:
                    parts.append(tensors[name].reshape(-1))
                    if rank:
                        dist.send(parts[0], 0)
                elif world.rank == 0:
                    count, dtype, device = of_rank[name]
                    parts.append(torch.empty(count, dtype=dtype, device="cpu" if device == "cpu" else world.device))
                    dist.recv(parts[-1], rank)
            if world.rank == 0:
                whole[name] = self._joined(name, parts)
        return whole

    def _joined(self, name: str, parts: list[Tensor]) -> Tensor:
        parameter, key = _split(name)
        if key == "step":
            return parts[0].view(())
        flat, shape = torch.cat(parts), self._shapes[parameter]
        return flat.view(shape) if flat.numel() == shape.numel() else flat


def _split(name: str) -> tuple[str, str]:
    parameter, _, key = name.partition(":")
    return parameter, key


@dataclass(frozen=True)
class Sent:
    work: Any
    whole: Tensor
    """Kept until it was sent."""
    shard: Tensor


class Bucket:
    """Parameters of one dtype, end to end in one buffer: each rank's shard of it is as long."""

    def __init__(self, named: list[Named], world: World) -> None:
        self.parameters = [parameter for _, parameter in named]
        first = self.parameters[0]
        self._wide = first.grad_dtype or first.dtype
        self._starts, self._size = laid_out(self.parameters, world.size)
        self._flat = first.new_zeros(world.size * self._size, requires_grad=False)
        begin = world.rank * self._size
        self._own = self._flat[begin : begin + self._size]
        self._underway: Sent | None = None
        self._gradient: Tensor | None = None
        """This rank's shard, of what was sent in the window so far."""
        self.used = [False] * len(named)
        """For each parameter, whether this rank had a gradient to send in the window."""
        self.own: dict[Tensor, Piece] = {}
        """The pieces in this rank's shard."""
        self._taken: list[tuple[Tensor, slice] | None] = []
        """For each parameter its piece here, and where that is in the shard."""
        for (name, parameter), start in zip(named, self._starts, strict=True):
            home = self._flat[start : start + parameter.numel()].view(parameter.shape)
            home.copy_(parameter.detach())
            parameter.data = home
            low, high = max(begin, start), min(begin + self._size, start + parameter.numel())
            if low >= high:
                self._taken.append(None)
                continue
            tensor = nn.Parameter(self._flat[low:high])
            tensor.grad_dtype = parameter.grad_dtype
            self.own[tensor] = Piece(name=name, shape=parameter.shape, start=low - start, stop=high - start)
            self._taken.append((tensor, slice(low - begin, high - begin)))

    def send(self) -> None:
        """Begins to add up the gradients over all ranks, each rank getting its shard; they are freed here."""
        whole = torch.zeros_like(self._flat, dtype=self._wide)  # zeros: what is between parameters, or not used here
        for place, (parameter, start) in enumerate(zip(self.parameters, self._starts, strict=True)):
            if parameter.grad is not None:
                self.used[place] = True
                whole[start : start + parameter.numel()].view(parameter.shape).copy_(parameter.grad)
                parameter.grad = None
        shard = torch.empty_like(self._own, dtype=self._wide)
        self._underway = Sent(reduce_scatter(shard, whole, async_op=True), whole, shard)

    def land(self) -> None:
        """Waits for what was sent, and adds it to the window's."""
        if self._underway is not None:
            self._underway.work.wait()
            shard, self._underway = self._underway.shard, None
            self._gradient = shard if self._gradient is None else self._gradient.add_(shard)

    def hand_over(self, used: Iterable[bool]) -> None:
        """Gives each piece its gradient; none to one that no rank has used, as a plain loop would have none."""
        assert self._gradient is not None
        for taken, is_used in zip(self._taken, used, strict=True):
            if taken is not None:
                tensor, where = taken
                tensor.grad = self._gradient[where] if is_used else None
        self._gradient, self.used = None, [False] * len(self.used)

    def gather(self) -> Any:
        return all_gather(self._flat, self._own, async_op=True)


def laid_out(parameters: Iterable[Tensor], shards: int) -> tuple[list[int], int]:
    """(where in the buffer each begins, elements of a shard).

    What may have its states in blocks begins with a block, and so does its piece in every shard: cut elsewhere, a block
    would have two scales, and another content after a resume on fewer ranks.
    """
    starts, end, unit = [], 0, 1
    for parameter in parameters:
        if stored_format(parameter, "8bit") == "8bit":
            unit = BLOCK
            end = -(-end // BLOCK) * BLOCK
        starts.append(end)
        end += parameter.numel()
    return starts, -(-end // (shards * unit)) * unit
