import itertools
from typing import Any, Literal

import numpy as np
import pytest
import torch

from thrice.data import batches as batches_module
from thrice.data.batches import IGNORE, Batch, Position, Samples, Windows, cut, order, split
from thrice.data.tokens import TokenStore
from thrice.errors import DataError


def store_of(tokens: np.ndarray[Any, Any]) -> TokenStore:
    return TokenStore(tokens=tokens, documents=1, bytes=len(tokens), fingerprint="")


def stream(length: int, dtype: str = "u1") -> np.ndarray[Any, Any]:
    return np.random.default_rng(length).integers(1, 250, length).astype(dtype)


def epoch_of(windows: Windows, position: Position) -> tuple[list[list[int]], Position]:
    """The windows of the epoch that begins after `position`, and the position after them."""
    ids, after = windows.at(position)
    epoch = after.epoch
    taken: list[list[int]] = []
    while after.epoch == epoch:
        assert len(taken) < windows.count
        taken.append(ids.tolist())
        position = after
        ids, after = windows.at(position)
    return taken, position


# Samples


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u4"])
@pytest.mark.parametrize(("length", "sequence"), [(0, 4), (1, 4), (2, 4), (5, 4), (6, 4), (12, 4), (100, 1)])
def test_every_token_but_the_first_is_a_target_once(length: int, sequence: int, dtype: str) -> None:
    tokens = stream(length, dtype)
    samples = Samples(tokens, sequence)
    assert len(samples) == -(-max(length - 1, 0) // sequence)
    batch = samples.batch(range(len(samples)))
    assert batch.inputs.shape == batch.targets.shape == (len(samples), sequence)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    counts = batch.targets != IGNORE
    assert batch.targets[counts].tolist() == tokens[1:].tolist()
    assert batch.inputs[counts].tolist() == tokens[:-1].tolist()
    assert not batch.inputs[~counts].any()
    assert batch.count == max(length - 1, 0)


def test_a_batch_is_its_samples_in_the_order_asked() -> None:
    tokens = stream(1003, "<u2")
    samples = Samples(tokens, 10)
    for ids in ([3], [7, 0, 7, 99], [100, 5], []):
        batch = samples.batch(np.array(ids, dtype=np.int64))
        assert batch.sample_ids == tuple(ids)
        assert batch.inputs.is_contiguous()
        assert batch.targets.is_contiguous()
        for row, sample in enumerate(ids):
            seen = tokens[sample * 10 : sample * 10 + 11].tolist()
            missing = 11 - len(seen)
            assert batch.inputs[row].tolist() == seen[:-1] + [0] * missing
            assert batch.targets[row].tolist() == seen[1:] + [IGNORE] * missing


@pytest.mark.parametrize("sample", [-1, 100, 2**40])
def test_a_sample_that_is_not_there(sample: int) -> None:
    with pytest.raises(IndexError, match="100 samples"):
        Samples(stream(1001), 10).batch([0, sample])


def test_a_batch_counts_what_is_not_ignored_and_moves() -> None:
    targets = torch.tensor([[1, IGNORE, 0], [IGNORE, IGNORE, IGNORE]])
    batch = Batch.of(targets, targets, (4, 9))
    assert batch.count == 2
    moved = batch.to("meta")
    assert (moved.inputs.device.type, moved.targets.device.type) == ("meta", "meta")
    assert moved.sample_ids == (4, 9)


# Split


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.02, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("length", [101, 1000, 5003])
def test_training_and_validation_share_no_target_and_lose_none(length: int, fraction: float) -> None:
    tokens = stream(length)
    training, validation = split(store_of(tokens), 10, fraction)
    seen = [samples.batch(range(len(samples))).targets for samples in (training, validation)]
    assert torch.cat([targets[targets != IGNORE] for targets in seen]).tolist() == tokens[1:].tolist()
    assert not (seen[1] == IGNORE).any()
    expected = int(length * fraction / 10)
    assert len(validation) == (max(expected, 1) if fraction else 0)


def test_validation_needs_room() -> None:
    assert [len(samples) for samples in split(store_of(stream(21)), 10, 0.01)] == [1, 1]
    assert [len(samples) for samples in split(store_of(stream(20)), 10, 0.01)] == [2, 0]
    assert [len(samples) for samples in split(store_of(stream(11)), 10, 0.01)] == [1, 0]


@pytest.mark.parametrize(("length", "sequence", "fraction"), [(10, 10, 0.0), (1, 10, 0.5), (50, 10, 0.95)])
def test_too_little_to_train_on(length: int, sequence: int, fraction: float) -> None:
    with pytest.raises(DataError) as caught:
        split(store_of(stream(length)), sequence, fraction)
    said = str(caught.value)
    assert f"{length} tokens" in said
    assert f"takes {sequence + 1}" in said
    assert "more data" in said
    assert ("evaluation.fraction below" in said) == (fraction > 0.9)


@pytest.mark.parametrize("length", [2, 3, 10, 37, 50])
@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.3, 0.5, 0.95])
def test_the_sequence_that_is_proposed_works(length: int, fraction: float) -> None:
    with pytest.raises(DataError) as caught:
        split(store_of(stream(length)), 1000, fraction)
    fix = str(caught.value).split("→")[1]
    if length * (1 - fraction) < 2:
        assert "sequence" not in fix
    else:
        proposed = int(fix.split("sequence = ")[1].split(" ")[0])
        training, _ = split(store_of(stream(length)), proposed, fraction)
        assert len(training) >= 1


# Order


@pytest.mark.parametrize("count", [*range(1, 40), 97, 100, 101, 255, 256, 257, 1009, 4096, 65_537, 100_000])
def test_the_order_is_a_permutation(count: int) -> None:
    for seed, epoch in ((0, 0), (1, 3), (2**62 + 5, 10**6)):
        assert np.array_equal(np.sort(order(seed, epoch, count, range(count))), np.arange(count))


def test_the_order_is_evaluated_where_it_is_asked() -> None:
    whole = order(7, 2, 1000, range(1000))
    assert whole.dtype == np.int64
    positions = [999, 0, 500, 500]
    assert order(7, 2, 1000, positions).tolist() == whole[positions].tolist()
    far = order(7, 2, 10**15, [0, 10**15 - 1])  # far beyond what could be laid out in memory
    assert ((far >= 0) & (far < 10**15)).all()


def test_the_order_is_the_same_everywhere() -> None:
    # Written down from the first run: a change here changes the data order of every run that is resumed.
    assert order(0, 0, 10, range(10)).tolist() == [8, 2, 5, 7, 1, 4, 0, 9, 6, 3]
    assert order(1234, 5, 1_000_003, range(5)).tolist() == [544215, 445283, 542808, 166824, 26688]


def test_every_small_permutation_comes_equally_often() -> None:
    trials = 4_800
    seen: dict[tuple[int, ...], int] = {}
    for seed in range(trials):
        drawn = tuple(order(seed, 0, 4, range(4)).tolist())
        seen[drawn] = seen.get(drawn, 0) + 1
    assert len(seen) == 24
    expected = trials / 24
    chi_squared = sum((times - expected) ** 2 / expected for times in seen.values())
    assert chi_squared < 49.7  # 23 degrees of freedom: exceeded by chance in 1 of 1,000; the seeds are fixed


@pytest.mark.parametrize("count", [1000, 4096, 50_021])
def test_no_correlation_is_visible(count: int) -> None:
    # Of independent permutations each of these is normal with deviation 1/√count; the limit is 5 of them.
    limit = 5 / np.sqrt(count)
    place = np.arange(count)
    drawn = [order(seed, epoch, count, place) for seed in range(3) for epoch in range(3)]
    for ids in drawn:
        assert abs(np.corrcoef(place, ids)[0, 1]) < limit
        for lag in (1, 2, 32, int(np.sqrt(count)), int(np.sqrt(count)) + 1):
            assert abs(np.corrcoef(ids[:-lag], ids[lag:])[0, 1]) < limit
        # Neighbours stay neighbours in 2 of `count` places on average: Poisson, so hardly ever in 20.
        assert (np.abs(np.diff(ids)) == 1).sum() < 20
        assert (ids == place).sum() < 12  # fixed points: one on average
    for one, other in itertools.combinations(drawn, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < limit
        assert (one == other).sum() < 12


def test_each_digit_of_the_position_spreads_over_all_samples() -> None:
    # The first window of an epoch is a fair draw: over many seeds each tenth of the samples is drawn alike.
    first = np.concatenate([order(seed, 0, 1000, range(8)) for seed in range(500)])
    tenths = np.bincount(first // 100, minlength=10)
    assert np.abs(tenths - 400).max() < 5 * np.sqrt(400 * 0.9)  # binomial deviation


def test_large_seeds_differ_from_small_ones() -> None:
    keys = itertools.product((5, 2**32 + 5, 5 * 2**32), (0, 1, 2))
    drawn = {tuple(order(seed, epoch, 100, range(100))) for seed, epoch in keys}
    assert len(drawn) == 9


# Windows


@pytest.mark.parametrize("last_window", ["step", "drop"])
@pytest.mark.parametrize(
    ("count", "global_batch"), [(10, 4), (12, 4), (10, 10), (1, 1), (13, 5), (5000, 1700), (2048, 512)]
)
def test_an_epoch_takes_each_sample_once(count: int, global_batch: int, last_window: Literal["step", "drop"]) -> None:
    windows = Windows(count=count, global_batch=global_batch, seed=3, last_window=last_window)
    position = Position()
    epochs = []
    for epoch in range(3):
        taken, position = epoch_of(windows, position)
        whole = order(3, epoch, count, range(count)).tolist()
        full, rest = divmod(count, global_batch)
        ids = list(itertools.chain(*taken))
        assert [len(window) for window in taken[:full]] == [global_batch] * full
        if last_window == "step":
            assert ids == whole
            assert len(taken) == full + (rest > 0)
        else:
            assert ids == whole[: full * global_batch]
            assert len(taken) == full
        epochs.append(ids)
    assert count < 4 or len({tuple(ids) for ids in epochs}) == 3


def test_a_window_larger_than_an_epoch_is_the_epoch() -> None:
    windows = Windows(count=5, global_batch=8, seed=0)
    ids, position = windows.at(Position())
    assert sorted(ids.tolist()) == list(range(5))
    assert position == Position(0, 5)
    ids, position = windows.at(position)
    assert (sorted(ids.tolist()), position) == (list(range(5)), Position(1, 5))
    with pytest.raises(DataError, match=r"5 training samples.*global_batch = 8"):
        Windows(count=5, global_batch=8, seed=0, last_window="drop")


@pytest.mark.parametrize("last_window", ["step", "drop"])
def test_resuming_is_a_position(last_window: Literal["step", "drop"]) -> None:
    def take(steps: int, position: Position) -> tuple[list[list[int]], Position]:
        # A new object each time, and nothing remembered, as in another process.
        windows = Windows(count=2500, global_batch=300, seed=11, last_window=last_window)
        batches_module._block.cache_clear()
        taken = []
        for _ in range(steps):
            ids, position = windows.at(position)
            taken.append(ids.tolist())
        return taken, position

    through, end = take(20, Position())
    for stop in range(20):
        before, position = take(stop, Position())
        after, resumed_end = take(20 - stop, Position(position.epoch, position.offset))
        assert before + after == through
        assert resumed_end == end


def test_a_window_cannot_be_spoilt_for_the_next_reader() -> None:
    windows = Windows(count=100, global_batch=10, seed=0)
    ids, _ = windows.at(Position())
    expected = ids.tolist()
    ids[:] = -1
    assert windows.at(Position())[0].tolist() == expected


@pytest.mark.parametrize("offset", [-1, 101])
def test_a_position_of_other_data_is_refused(offset: int) -> None:
    with pytest.raises(DataError, match="outside its 100 samples"):
        Windows(count=100, global_batch=10, seed=0).at(Position(0, offset))


@pytest.mark.parametrize(("count", "micro_batch"), [(10, 4), (8, 4), (3, 4), (0, 4), (5, 1)])
def test_micro_batches_are_the_window_in_order(count: int, micro_batch: int) -> None:
    ids = np.arange(count)[::-1]
    parts = cut(ids, micro_batch)
    assert list(itertools.chain(*parts)) == ids.tolist()
    assert [len(part) for part in parts[:-1]] == [micro_batch] * (len(parts) - 1)
    assert all(0 < len(part) <= micro_batch for part in parts)


def test_evaluation_sees_ten_samples_as_ten() -> None:
    # pytorch#25162: 10 samples became 12, or 8. In micro-batches of 4 they are 10, and so are their targets.
    samples = Samples(stream(10 * 16 - 3), 16)
    seen = [samples.batch(ids) for ids in cut(np.arange(len(samples)), 4)]
    assert [sample for batch in seen for sample in batch.sample_ids] == list(range(10))
    assert sum(batch.count for batch in seen) == 10 * 16 - 4
