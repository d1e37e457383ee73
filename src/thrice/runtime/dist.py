"""The processes of a run, and the only place where they are joined.

Every method of a World is collective: all its ranks call it, in the same order. Alone, each returns what it was given.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from thrice.errors import LostPeer, Stalled, ThriceError, UsageError
from thrice.spec.dump import dump, settings
from thrice.spec.job import Job

T = TypeVar("T")

TIMED_OUT = re.compile(r"timed? ?out|watchdog", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a launcher has put this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    """Processes on this machine."""
    address: str
    port: int


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """What torchrun's variables say, or those of a SLURM step (srun); None where no launcher has started us.

    Raises UsageError where they are there and of no use.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        assumed = {"LOCAL_RANK": environment.get("RANK"), "LOCAL_WORLD_SIZE": environment.get("WORLD_SIZE")}
    elif int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "MASTER_PORT")
        # one port for each job, so that two on one machine do not meet
        assumed = {"MASTER_PORT": str(20_000 + int(environment.get("SLURM_JOB_ID", "0")) % 10_000)}
    else:
        return None
    values = []
    for name in names:
        value = environment.get(name, assumed.get(name)) or ""
        whole = re.match(r"\d+", value)  # SLURM writes "4(x2)" for four tasks on each of two machines
        if whole is None:
            raise UsageError(
                f"{name} = {value!r}: a launcher's variables are there, and this one is no whole number\n"
                "  start with torchrun or srun, or unset RANK and WORLD_SIZE: thrice starts the processes itself"
            )
        values.append(int(whole[0]))
    rank, size, local_rank, local_size, port = values
    if not (0 <= rank < size and 0 <= local_rank < local_size):
        raise UsageError(f"rank {rank} of {size} (local {local_rank} of {local_size}): the launcher contradicts itself")
    address = environment.get("MASTER_ADDR") or _first_node(environment)
    return Place(rank=rank, size=size, local_rank=local_rank, local_size=local_size, address=address, port=port)


def _first_node(environment: Mapping[str, str]) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST")
    if nodes is None:
        raise UsageError("MASTER_ADDR is not set\n  it is the host of rank 0; torchrun sets it")
    if "[" not in nodes:
        return nodes.partition(",")[0]
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"the first machine of {nodes} is not known ({error})\n  set MASTER_ADDR to it") from error
    return listed.stdout.split()[0]


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes that train together."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    """This rank's own; None where it is the caller's to choose."""
    _store: Store | None = field(default=None, repr=False)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Adds up the tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def totals(self, *values: float) -> list[float]:
        """Each of the numbers added up over all ranks, in float64: whole numbers are exact up to 2⁵³."""
        if self.size == 1:
            return list(values)
        return self.sum_(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()

    def largest(self, value: float) -> float:
        """Of all ranks' numbers, in float64."""
        if self.size == 1:
            return value
        number = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return number.item()

    def gather(self, value: T) -> list[T]:
        """The value of every rank, by rank."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        if self.size == 1:
            return value
        held: list[Any] = [value]
        dist.broadcast_object_list(held, device=self.device)
        return held[0]  # type: ignore[no-any-return]

    def barrier(self) -> None:
        if self.size > 1:
            self.totals(0)

    def arrived(self, at: int) -> None:
        """Notes that this rank has come so far: what `missing` goes by. Not collective."""
        if self._store is not None:
            self._store.set(f"arrived/{self.rank}", str(at))

    def agree(self, job: Job) -> None:
        """Raises UsageError on every rank where one has another job, code or torch than rank 0, and names them."""
        if self.size == 1:
            return
        have = {f"job's {key}": value for key, value in settings(dump(job)).items()}
        of_ranks = self.gather({**have, "code of thrice": _code(), "torch": torch.__version__})
        first, nothing = of_ranks[0], "not given"
        differ = [
            f"the {key} is {own.get(key, nothing)} on rank {rank} and {first.get(key, nothing)} on rank 0"
            for rank, own in enumerate(of_ranks)
            for key in first | own
            if own.get(key) != first.get(key)
        ]
        if differ:
            raise UsageError(
                "the processes are not of one run\n  "
                + "\n  ".join(differ[:8])
                + "\n  start them all with the same file, flags and installation"
            )

    def must_be(self, processes: int) -> None:
        """Raises UsageError unless the world has so many: one of several, alone, would train on its share only."""
        if self.size != processes:
            raise UsageError(
                f"processes = {processes}: this is a world of {self.size}\n"
                "  the command line starts and joins them; in a program of your own: with thrice.joined(...)"
            )

    def missing(self) -> str:
        """The ranks that are behind the others, in words. Not collective."""
        if self._store is None:
            return "it is not known which"
        came = {}
        for rank in range(self.size):
            try:
                came[rank] = int(self._store.get(f"arrived/{rank}")) if self._store.check([f"arrived/{rank}"]) else -1
            except (RuntimeError, ValueError):  # the store went with the process that held it
                return "it is not known which"
        last = max(came.values())
        behind = [f"rank {rank} (last seen {_seen(at)})" for rank, at in came.items() if at < last]
        return ", ".join(behind) or f"all were {_seen(last)}"


def _code() -> str:
    """The fingerprint of this package's source."""
    package = Path(__file__).parents[1]
    sources = sorted(package.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def _seen(at: int) -> str:
    return "before the first step" if at < 0 else f"at step {at + 1}"


ALONE = World()


@contextmanager
def joined(
    processes: int,
    *,
    timeout_s: float,
    here: Place | None = None,
    failed: Callable[[Exception], None] = lambda error: None,
) -> Iterator[World]:
    """The world of the `processes` that the launcher started; ALONE where that is one and there is no launcher.

    Every rank enters. Raises UsageError where the launcher started another number, or rank 0 cannot be reached;
    within it LostPeer where another process has died, Stalled where one did not come within `timeout_s`. `failed` is
    told what is raised before this rank leaves, so before any other can lose it.
    """
    here = here or place()
    obtained = 1 if here is None else here.size
    if obtained != processes:
        raise UsageError(
            f"processes = {processes}: the launcher has started {obtained}\n"
            f"  --processes {obtained}, or start {processes}; without torchrun or srun thrice starts them itself"
        )
    if here is None or processes == 1:
        yield ALONE
        return
    world = _join(here, timeout_s)
    try:
        yield world
    except Exception as error:
        if isinstance(error, ThriceError) or not _is_of_peers(error):
            failed(error)
            raise
        lost = _lost(error, here, world, timeout_s)
        failed(lost)
        raise lost from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(here: Place, timeout_s: float) -> World:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        device, backend = torch.device("cpu"), "gloo"
    else:
        count = torch.accelerator.device_count()
        if here.local_size > count:
            raise UsageError(
                f"{here.local_size} processes on {socket.gethostname()}, which has {count} devices\n"
                f"  one process for each: --processes {count}"
            )
        device = torch.device(accelerator.type, here.local_rank)
        torch.accelerator.set_device_index(here.local_rank)
        # the host's tensors too: counts, objects and what is offloaded
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    timeout = timedelta(seconds=timeout_s)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then the agent holds it, and not rank 0
        tcp = TCPStore(here.address, here.port, here.size, here.rank == 0 and not agent, timeout)
        # prefixed, so that processes started again do not read addresses of those before them
        store = PrefixStore(f"thrice/{restart}", tcp)
        dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.size, timeout=timeout)
    except (RuntimeError, dist.DistError) as error:
        raise UsageError(
            f"{_who(here)} could not join the others at {here.address}:{here.port} within {timeout_s:g} s: "
            f"{_first_line(error)}\n"
            "  the port may be in use, rank 0's host unreachable, or a process not started; MASTER_ADDR and "
            "MASTER_PORT say where they meet"
        ) from error
    assert dist.get_world_size() == here.size, (dist.get_world_size(), here.size)
    return World(rank=here.rank, size=here.size, device=device, _store=store)


def _lost(error: Exception, here: Place, world: World, timeout_s: float) -> LostPeer:
    if TIMED_OUT.search(str(error)):
        return Stalled(
            f"{_who(here)} waited {timeout_s:g} s for another process: {world.missing()}\n"
            "  launch.timeout_s is how long to wait"
        )
    return LostPeer(f"{_who(here)} lost another process: {_first_line(error)}")


def _who(here: Place) -> str:
    return f"rank {here.rank} on {socket.gethostname()}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _is_of_peers(error: BaseException) -> bool:
    """Whether a collective failed, and not the computation."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "Socket", "c10d"))
