"""Joining: what launchers say, a world that is not the one asked for, and ranks that die or do not come."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from thrice.errors import LostPeer, Stalled, UsageError
from thrice.runtime.dist import ALONE, Place, World, joined, place

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "there",
    "MASTER_PORT": "1234",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "one", "SLURM_JOB_ID": "1200345",
}  # fmt: skip


def test_places() -> None:
    assert place({}) is None
    assert place(TORCHRUN) == Place(rank=3, size=4, local_rank=1, local_size=2, address="there", port=1234)
    assert place(SLURM) == Place(rank=5, size=8, local_rank=1, local_size=4, address="one", port=20345)
    assert place({**SLURM, "MASTER_ADDR": "two", "MASTER_PORT": "7"}).address == "two"


def test_an_allocation_is_no_launcher() -> None:
    """A shell or a batch script within SLURM is one process, whatever the number of tasks that were asked for."""
    assert place({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": "four"}, "RANK = 'four'"),
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"MASTER_PORT": ""}, "MASTER_PORT = ''"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
    ids=str,
)
def test_variables_of_no_use_are_named(changes: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        place({**TORCHRUN, **changes})


def test_a_world_that_was_not_asked_for_is_refused() -> None:
    """accelerate `launch --num_processes 2` silently ran one process."""
    for asked in (1, 3):
        here = Place(rank=0, size=2, local_rank=0, local_size=2, address="127.0.0.1", port=1)
        with (
            pytest.raises(UsageError, match=f"processes = {asked}: the launcher has started 2"),
            joined(asked, timeout_s=1, here=here),
        ):
            pass
    with joined(1, timeout_s=1) as world:
        assert world is ALONE


def test_nobody_there_ends_at_the_timeout_and_says_where() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = Place(rank=1, size=2, local_rank=1, local_size=2, address="127.0.0.1", port=port)
    before = time.monotonic()
    with (
        pytest.raises(UsageError, match=f"could not join the others at 127.0.0.1:{port}"),
        joined(2, timeout_s=2, here=here),
    ):
        pass
    assert time.monotonic() - before < 30


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        here = Place(rank=0, size=2, local_rank=0, local_size=2, address="127.0.0.1", port=port)
        with (
            pytest.raises(UsageError, match=f"(?s)127.0.0.1:{port}.*port may be in use"),
            joined(2, timeout_s=2, here=here),
        ):
            pass


def test_alone_everything_is_what_it_was() -> None:
    tensor = torch.ones(3)
    assert ALONE.sum_(tensor) is tensor
    assert ALONE.totals(1, 2.5) == [1, 2.5]
    assert ALONE.gather("a") == ["a"]
    assert ALONE.broadcast("a") == "a"


def spoken(world: World):
    ones = world.sum_(torch.full((2,), float(world.rank)))
    return ones.tolist(), world.totals(2**53 - 4, world.rank), world.gather(world.rank), world.broadcast(world.rank + 7)


@pytest.mark.xdist_group("processes")
def test_together(workers) -> None:
    assert workers(4).call(spoken) == [([6.0, 6.0], [4 * (2**53 - 4), 6], [0, 1, 2, 3], 7)] * 4


def dies(world: World) -> None:
    if world.rank == 1:
        raise ValueError("of its own")
    world.barrier()


@pytest.mark.xdist_group("processes")
def test_the_first_error_is_the_one_that_counts(workers) -> None:
    before = time.monotonic()
    with pytest.raises(ValueError, match="of its own"):
        workers(2).call(dies)
    assert time.monotonic() - before < 30, "nobody waits for a process that has died"


def stalls(world: World, patience_s: float) -> str:
    """Joined anew with less patience: rank 1 comes as far as step 3 and then sleeps."""
    port = world.broadcast(_free_port())
    here = Place(rank=world.rank, size=2, local_rank=world.rank, local_size=2, address="127.0.0.1", port=port)
    torch.distributed.destroy_process_group()
    try:
        with joined(2, timeout_s=patience_s, here=here) as inner:
            for step in range(3):
                inner.arrived(step)
                inner.barrier()
            if inner.rank == 1:
                time.sleep(patience_s + 4)
                return ""
            inner.arrived(3)
            inner.barrier()
    except LostPeer as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.xdist_group("processes")
def test_a_rank_that_does_not_come_is_named(workers) -> None:
    said = workers(2).call(stalls, 2.0)[0]
    workers(2).restart()  # they have left the group that they shared
    assert said.startswith(Stalled.__name__)
    assert "waited 2 s" in said
    assert "rank 1 (last seen at step 3)" in said
