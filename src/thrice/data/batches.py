"""Samples, their order, and the windows and micro-batches that a run takes them in.

T = `sequence`, B = samples of a batch. A sample is T inputs and the T tokens that follow them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from thrice.data.tokens import TokenStore
from thrice.errors import DataError

IGNORE = -100
"""The target of a position that does not count; torch's own default."""

Ids = NDArray[np.int64]

_ROUNDS = 8
_BLOCK_SAMPLES = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    inputs: torch.Tensor
    """(B, T) int64."""
    targets: torch.Tensor
    """(B, T) int64; IGNORE where a position does not count."""
    sample_ids: tuple[int, ...]
    count: int
    """Targets that count; kept apart, so that asking waits for no device and a rehearsal knows it."""

    @classmethod
    def of(cls, inputs: torch.Tensor, targets: torch.Tensor, sample_ids: tuple[int, ...]) -> Batch:
        """A batch whose targets are on the host, to be counted."""
        count = int(torch.count_nonzero(targets != IGNORE))
        return cls(inputs=inputs, targets=targets, sample_ids=sample_ids, count=count)

    def to(self, device: torch.device | str) -> Batch:
        return Batch(
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            sample_ids=self.sample_ids,
            count=self.count,
        )


class Samples:
    """A run of tokens as samples: sample i reads tokens[i·T : i·T + T + 1].

    Every token but the first is a target exactly once. The last sample may be partial: its inputs are padded
    with 0 and its targets with IGNORE.
    """

    def __init__(self, tokens: NDArray[Any], sequence: int) -> None:
        self.sequence = sequence
        targets = max(len(tokens) - 1, 0)
        self._whole = targets // sequence
        self._count = -(-targets // sequence)
        self._rest = tokens[self._whole * sequence :]
        # (whole, T + 1): overlapping rows of the memory map itself, so a gather copies whole rows.
        self._rows = np.lib.stride_tricks.as_strided(
            tokens,
            shape=(self._whole, sequence + 1),
            strides=(sequence * tokens.itemsize, tokens.itemsize),
            writeable=False,
        )

    def __len__(self) -> int:
        return self._count

    def batch(self, ids: ArrayLike) -> Batch:
        """The samples `ids` as one Batch, in that order. Raises IndexError outside range(len(self))."""
        wanted = np.asarray(ids, dtype=np.int64)
        sample_ids = tuple(wanted.tolist())
        if sample_ids and not 0 <= min(sample_ids) <= max(sample_ids) < self._count:
            raise IndexError(f"sample ids {min(sample_ids)} to {max(sample_ids)} of {self._count} samples")
        if sample_ids and max(sample_ids) == self._whole:
            inputs, targets = self._padded(wanted)
        else:
            rows = self._rows[wanted]
            inputs, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        return Batch(
            inputs=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            sample_ids=sample_ids,
            count=int(np.count_nonzero(targets != IGNORE)),
        )

    def nothing(self) -> Batch:
        """A batch of no sample: one row to run on, and no target in it. It adds exactly 0 to a loss and a gradient."""
        inputs = torch.zeros(1, self.sequence, dtype=torch.int64)
        return Batch(inputs=inputs, targets=torch.full_like(inputs, IGNORE), sample_ids=(), count=0)

    def _padded(self, wanted: Ids) -> tuple[Ids, Ids]:
        shape = (len(wanted), self.sequence)
        inputs, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
        for row, sample in enumerate(wanted):
            tokens = self._rest if sample == self._whole else self._rows[sample]
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            targets[row, : len(tokens) - 1] = tokens[1:]
        return inputs, targets


def split(store: TokenStore, sequence: int, fraction: float) -> tuple[Samples, Samples]:
    """(training, validation). Validation is the tail: `fraction` of the tokens, in whole samples.

    Where `fraction` is above 0 and the tokens suffice for one sample each, validation has at least one; where
    it is 0, none. Training never sees a validation target. Raises DataError where training would be shorter
    than one sample of T + 1 tokens.
    """
    tokens = len(store)
    held_out = int(tokens * fraction / sequence)
    if held_out == 0 and fraction > 0 and tokens > 2 * sequence:
        held_out = 1
    training = tokens - held_out * sequence
    if training <= sequence:
        raise DataError(_too_short(tokens, training, sequence, fraction))
    # The last training token is the first validation input; the targets are disjoint.
    return Samples(store.tokens[:training], sequence), Samples(store.tokens[training - 1 :], sequence)


def _too_short(tokens: int, training: int, sequence: int, fraction: float) -> str:
    held_out = f", of which {tokens - training:,} are held out for evaluation" if training < tokens else ""
    # What is held out is at most the fraction, so a sequence of this length always leaves one sample.
    longest = int(tokens * (1 - fraction)) - 1
    fixes = ["more data"]
    fixes += [f"sequence = {longest} or less"] if longest > 0 else []
    fixes += [f"an evaluation.fraction below {fraction:g}"] if held_out else []
    return (
        f"the data is too short: it has {tokens:,} tokens{held_out}; one sample of sequence = {sequence:,} "
        f"takes {sequence + 1:,}\n  → {', or '.join(fixes)}"
    )


def order(seed: int, epoch: int, count: int, positions: ArrayLike) -> Ids:
    """The samples at `positions` of an epoch: a permutation of range(count) keyed by (seed, epoch).

    It takes time and memory of len(positions), and integers alone, so it is the same on every machine. A
    position is a pair of digits (left, right) in a mixed base a·b just above `count`. Each round adds a keyed
    hash of one digit to the other, which can be undone whatever the hash is (a Feistel network; Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, third method). What falls outside range(count) is
    taken round again until it falls inside (cycle walking, their second method).
    """
    root = isqrt(count - 1) + 1
    base_left, base_right = np.uint64(root), np.uint64(-(-count // root))
    keys = _round_keys(seed, epoch)
    ids = np.array(positions, dtype=np.uint64)
    outside = np.ones(ids.shape, dtype=bool)
    while outside.any():
        left, right = np.divmod(ids[outside], base_right)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            left = (left + _mixed(right + even) % base_left) % base_left
            right = (right + _mixed(left + odd) % base_right) % base_right
        ids[outside] = left * base_right + right
        outside = ids >= count
    return ids.astype(np.int64)


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): each bit of the result depends on all."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    state = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(2 * _ROUNDS, np.uint64)
    return state.astype(np.uint64, copy=False)


@lru_cache(maxsize=8)
def _block(seed: int, epoch: int, count: int, block: int) -> Ids:
    """`order` of one block of positions: a window takes few, and to ask for few costs as much as for many."""
    start = block * _BLOCK_SAMPLES
    return order(seed, epoch, count, np.arange(start, min(start + _BLOCK_SAMPLES, count)))


@dataclass(frozen=True, order=True)
class Position:
    """Where a run stands in its data; all that a resume needs."""

    epoch: int = 0
    offset: int = 0
    """Samples of the epoch consumed; an epoch that is used up stays at its count."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Which samples each optimizer step takes. It holds no state: a window is a function of its position."""

    count: int
    """Samples of an epoch."""
    global_batch: int
    """Samples of a window."""
    seed: int
    last_window: Literal["step", "drop"] = "step"
    """Whether an epoch's last, shorter window is given or passed over; a window never crosses an epoch."""

    def __post_init__(self) -> None:
        if self.last_window == "drop" and self.count < self.global_batch:
            raise DataError(
                f'last_window = "drop" would drop everything: the data has {self.count:,} training samples, '
                f"and a window takes global_batch = {self.global_batch:,}\n"
                f'  → global_batch = {self.count} or less, last_window = "step", or more data'
            )

    def at(self, position: Position, global_batch: int | None = None) -> tuple[Ids, Position]:
        """The sample ids of the window at `position`, 1-D, and the position after it.

        `global_batch` is that of the moment where it grows.
        """
        wanted = global_batch or self.global_batch
        epoch, start = position.epoch, position.offset
        if not 0 <= start <= self.count:
            raise DataError(
                f"position {start:,} of epoch {epoch} is outside its {self.count:,} samples: the data is not "
                "that of the run it continues\n"
                "  → resume with the data the run began with, or start a new one"
            )
        if self.count - start < (wanted if self.last_window == "drop" else 1):
            epoch, start = epoch + 1, 0
        stop = min(start + wanted, self.count)
        first, last = start // _BLOCK_SAMPLES, (stop - 1) // _BLOCK_SAMPLES
        blocks = [_block(self.seed, epoch, self.count, block) for block in range(first, last + 1)]
        begin = start - first * _BLOCK_SAMPLES
        return np.concatenate(blocks)[begin : begin + stop - start], Position(epoch, stop)


def cut(ids: Ids, micro_batch: int, rank: int = 0, ranks: int = 1) -> list[Ids]:
    """The ids in micro-batches, in order; the last may be shorter. A rank's own are every `ranks`-th of them."""
    return [ids[start : start + micro_batch] for start in range(rank * micro_batch, len(ids), ranks * micro_batch)]
