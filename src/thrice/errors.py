"""What can go wrong, each with the exit code of the command line.

ThriceError                  1   anything a user can act on
├── Diverged                 1   the loss or a gradient is not finite; nothing was updated
│   └── Spoilt               1   the same, and part of the parameters are updated with it
├── LostPeer                 1   another process of the run died
│   └── Stalled              1   another process did not come in time
├── UsageError               2   a command or a folder is not usable as asked
│   └── ConfigError          2   the file or a flag: every problem at once
├── Infeasible               3   no legal way to do it on this machine
├── VerificationFailed       4   the run is not the training it claims to be
├── DataError                5   data or a file of ours cannot be read or written
│   └── CheckpointError      5   a checkpoint is missing, damaged or not ours
├── OutOfMemory              6   memory ran out
└── Interrupted            130   stopped by the user (143 by SIGTERM), everything saved

A message says what happened, the value and its key, why (with the numbers) and what to do.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

PIPE_CLOSED = 141
"""128 + SIGPIPE: what a shell reports of a program whose reader has gone."""


class ThriceError(Exception):
    """Base of every error that is the user's to act on; the command line prints it without a traceback."""

    exit_code = 1


class Diverged(ThriceError):
    pass


class Spoilt(Diverged):
    pass


class LostPeer(ThriceError):
    pass


class Stalled(LostPeer):
    pass


class UsageError(ThriceError):
    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with a Job: `key` (dotted), the `value` given, `why`, and the `fix`."""

    key: str
    value: object = None
    why: str
    fix: str = ""

    def __str__(self) -> str:
        shown = f"{self.key} = {self.value!r}" if self.value is not None else self.key
        return f"{shown}: {self.why}" + (f"\n    → {self.fix}" if self.fix else "")


class ConfigError(UsageError):
    """Every problem found in a Job, in one message."""

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        where = f" in {source}" if source else ""
        super().__init__(f"{count}{where}\n" + "\n".join(f"  {problem}" for problem in self.problems))


class Infeasible(ThriceError):
    exit_code = 3


class VerificationFailed(ThriceError):
    exit_code = 4


class DataError(ThriceError):
    exit_code = 5


class CheckpointError(DataError):
    pass


class OutOfMemory(ThriceError):
    exit_code = 6


class Interrupted(ThriceError):
    """Raised after the step was finished and everything saved."""

    exit_code = 130

    def __init__(self, message: str, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def unforeseen(error: Exception) -> ThriceError:
    """An error of no class of ours, with the place it comes from."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return ThriceError(
        f"{type(error).__name__}: {error}\n  at {where.filename}:{where.lineno}; --debug shows how it came there"
    )
