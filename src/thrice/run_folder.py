"""The folder of a run: job.toml, record.json, metrics.jsonl, checkpoints/ and the tokenizer.

Small files are written whole or not at all; metrics.jsonl grows by a line, and what a checkpoint does not know
of is dropped on resume. While a run goes on it holds the folder's lock. Of several processes one writes.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from thrice.errors import DataError, UsageError
from thrice.files import truncate_metrics, write_whole


class RunFolder:
    """The folder at `path`, for one run; nothing is made before it is `held`. Without `writes` it is only read.

    Raises UsageError where another run lies there and `resume` is off, DataError where no folder can be made.
    """

    def __init__(self, path: str | Path, *, resume: bool, writes: bool = True) -> None:
        self.path = Path(path).expanduser()
        self.checkpoints = self.path / "checkpoints"
        self.rows = 0
        """Rows of metrics.jsonl."""
        self._metrics: BinaryIO | None = None
        self._resume, self._writes = resume, writes
        if writes:
            self._check_unused()
            check_writable(self.path, "run_dir")

    def _check_unused(self) -> None:
        if not self._resume and is_used(self.path):
            raise UsageError(
                f"run_dir = {str(self.path)!r} is not empty, and nothing in it is overwritten\n"
                "  --resume goes on with the run that is there; another --run_dir keeps both"
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Makes the folder and keeps every other process from training in it, until the block or this process ends.

        Raises UsageError where another holds it, or began and ended a run there meanwhile; DataError.
        """
        if not self._writes:
            yield
            return
        make(self.path, "run_dir")
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            with suppress(OSError):  # a filesystem without locks cannot tell
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UsageError(
                        f"run_dir = {str(self.path)!r}: a process is training there, and a second would spoil its run\n"
                        "  let it end or stop it, then --resume goes on; another --run_dir keeps both"
                    ) from None
            self._check_unused()
            yield
        finally:
            if self._metrics is not None:
                self._metrics.close()
            os.close(descriptor)

    def begin(self, job: str, rows: int) -> None:
        """Writes the job; of metrics.jsonl the first `rows` rows stay. Raises DataError."""
        self.rows = rows
        if not self._writes:
            return
        metrics = self.path / "metrics.jsonl"
        write_whole(self.path / "job.toml", job)
        self.rows = truncate_metrics(metrics, rows)
        try:
            self._metrics = metrics.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(self.path, error.strerror or str(error), "run_dir") from error

    def log(self, row: dict[str, Any]) -> None:
        """One line of metrics.jsonl, handed to the operating system at once. Raises DataError."""
        if not self._writes:
            self.rows += 1
            return
        assert self._metrics is not None, "only once it has begun"
        line = json.dumps(row).encode() + b"\n"
        try:
            written = self._metrics.write(line)
        except OSError as error:
            raise DataError(
                f"{self.path / 'metrics.jsonl'} cannot be written: {error.strerror}\n"
                "  what was saved before is intact: free some space, then --resume goes on from it"
            ) from error
        if written != len(line):
            raise DataError(
                f"{self.path / 'metrics.jsonl'} could be written in part only\n  free some space, then --resume"
            )
        self.rows += 1

    def write(self, name: str, content: dict[str, Any]) -> None:
        """A JSON file of the run."""
        if self._writes:
            write_whole(self.path / name, json.dumps(content, indent=1) + "\n")

    def measured(self) -> dict[str, Any] | None:
        """What a finished run measured, from its record.json; None where it has not finished."""
        try:
            measured = json.loads((self.path / "record.json").read_bytes())["measured"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return measured if isinstance(measured, dict) else None


def check_writable(folder: Path, name: str) -> None:
    """Raises DataError where the folder cannot be made or written, as far as that shows before; `name` is its key."""
    above = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not os.path.isdir(above):
        raise DataError(f"{name} = {str(folder)!r} cannot be made: {above} is not a folder\n  name another {name}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise _unwritable(folder, f"{above} is read-only for this user", name)


def make(folder: Path, name: str) -> None:
    """Raises DataError where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error.strerror or str(error), name) from error


def _unwritable(folder: Path, why: str, name: str) -> DataError:
    return DataError(f"{name} = {str(folder)!r} cannot be written: {why}\n  make it writable, or name another {name}")


def is_used(folder: Path, name: str = "run_dir") -> bool:
    """Whether there is something in the folder. Raises DataError where that cannot be seen; `name` is its key."""
    try:
        return bool(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DataError(f"{name} = {str(folder)!r} cannot be read: {error.strerror}\n  name another {name}") from error
