"""What a worker leaves for the process that started it: its process id, and the error that ended it.

Needs no torch: the command line notes errors here that come before anything else.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from thrice.errors import LostPeer, ThriceError

NOTES = "THRICE_NOTES"
"""Variable of a worker: the folder for both. Whoever has not been started by `launch` has none."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a worker ended."""

    rank: int
    host: str
    message: str
    exit_code: int
    at: float
    """Seconds since the epoch."""
    is_consequence: bool = False
    """Another process was lost, did not come, or has said it: the reason is elsewhere."""
    was_killed: bool = False

    @classmethod
    def of(cls, rank: int, error: ThriceError) -> Failure:
        return cls(
            rank=rank,
            host=socket.gethostname(),
            message=str(error),
            exit_code=error.exit_code,
            at=time.time(),
            is_consequence=isinstance(error, LostPeer | Told),
        )

    def __str__(self) -> str:
        who = f"rank {self.rank} on {self.host}"
        return self.message if self.message.startswith(who) else f"{who}: {self.message}"


class Told(ThriceError):
    """What rank 0 failed with and has said: the other ranks end with its exit code, and say nothing."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def ranks(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(rank, rank on this machine) by a launcher's variables, as far as they are numbers; zeros without one."""
    rank = environment.get("RANK", environment.get("SLURM_PROCID", "0"))
    local = environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", rank))
    return int(rank) if rank.isdecimal() else 0, int(local) if local.isdecimal() else 0


def is_one() -> bool:
    """Whether a launcher, ours or another, has started this process."""
    return "RANK" in os.environ or "SLURM_PROCID" in os.environ


def is_launched() -> bool:
    """Whether it was ours."""
    return NOTES in os.environ


def begin(rank: int) -> None:
    """Leaves this process's id, to which signals are forwarded."""
    if is_launched():
        _write(f"pid-{rank}", str(os.getpid()))


def note(rank: int, error: ThriceError) -> None:
    """Leaves the error, unless this worker has left one already."""
    if not is_launched() or (Path(os.environ[NOTES]) / f"error-{rank}").exists():
        return
    # it is ending: neither the parent, which ends all once one has failed, nor an impatient user should cut it short
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _write(f"error-{rank}", json.dumps(asdict(Failure.of(rank, error))))


def _write(name: str, text: str) -> None:
    path = Path(os.environ[NOTES]) / name
    part = path.with_name(f".{name}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def pids(folder: Path) -> list[int]:
    """Of the workers that have begun."""
    return [int(path.read_text(encoding="utf-8")) for path in folder.glob("pid-*")]


def failures(folder: Path) -> list[Failure]:
    """What workers have left, the earliest first."""
    found = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("error-*")]
    return sorted(found, key=lambda failure: failure.at)
