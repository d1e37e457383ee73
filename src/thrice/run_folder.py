"""The folder of a run: job.toml, record.json, metrics.jsonl, checkpoints/ and the tokenizer.

Small files are written whole or not at all; metrics.jsonl grows by a line, and what a checkpoint does not know
of is dropped on resume.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from thrice.errors import DataError, UsageError
from thrice.files import truncate_metrics, write_whole


class RunFolder:
    """The folder at `path`, for one run; nothing is made before `opened`.

    Raises UsageError where another run lies there and `resume` is off, DataError where no folder can be made.
    """

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self.path = Path(path).expanduser()
        self.checkpoints = self.path / "checkpoints"
        self.rows = 0
        """Rows of metrics.jsonl."""
        self._metrics: BinaryIO | None = None
        if not resume and is_used(self.path):
            raise UsageError(
                f"run_dir = {str(self.path)!r} is not empty, and nothing in it is overwritten\n"
                "  --resume goes on with the run that is there; another --run_dir keeps both"
            )
        above = next(folder for folder in (self.path, *self.path.parents) if os.path.lexists(folder))
        if not os.path.isdir(above):
            raise DataError(
                f"run_dir = {str(self.path)!r} cannot be made: {above} is not a folder\n  name another run_dir"
            )
        if not os.access(above, os.W_OK | os.X_OK):
            raise DataError(
                f"run_dir = {str(self.path)!r} cannot be written: {above} is read-only for this user\n"
                "  make it writable, or name a run_dir elsewhere"
            )

    @contextmanager
    def opened(self, job: str, rows: int) -> Iterator[None]:
        """Makes the folder and writes its job; of metrics.jsonl the first `rows` rows stay. Raises DataError."""
        metrics = self.path / "metrics.jsonl"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / "job.toml", job)
            self.rows = truncate_metrics(metrics, rows)
            self._metrics = metrics.open("ab", buffering=0)
        except OSError as error:
            raise DataError(
                f"run_dir = {str(self.path)!r} cannot be written: {error.strerror}\n"
                "  make it writable, or name a run_dir elsewhere"
            ) from error
        try:
            yield
        finally:
            self._metrics.close()

    def log(self, row: dict[str, Any]) -> None:
        """One line of metrics.jsonl, handed to the operating system at once. Raises DataError."""
        assert self._metrics is not None, "only while the folder is opened"
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
        write_whole(self.path / name, json.dumps(content, indent=1) + "\n")

    def measured(self) -> dict[str, Any] | None:
        """What a finished run measured, from its record.json; None where it has not finished."""
        try:
            measured = json.loads((self.path / "record.json").read_bytes())["measured"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return measured if isinstance(measured, dict) else None


def is_used(folder: Path) -> bool:
    """Whether there is something in the folder. Raises DataError where that cannot be seen."""
    try:
        return bool(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DataError(
            f"run_dir = {str(folder)!r} cannot be read: {error.strerror}\n  name another run_dir"
        ) from error
