"""The folder of a run: job.toml, record.json, metrics.jsonl, checkpoints/ and the tokenizer.

Small files are written whole or not at all; metrics.jsonl grows by a line, and a torn last line is dropped on
resume.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from thrice.errors import DataError, UsageError
from thrice.runtime.files import truncate_metrics, write_whole


class RunFolder:
    """Opens the folder for one run. Raises UsageError where another run lies there and `resume` is off."""

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._metrics: TextIO | None = None
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"run_dir = {str(self.path)!r} is a file, not a folder\n  name another run_dir")
        if not resume and self.path.is_dir() and any(self.path.iterdir()):
            raise UsageError(
                f"run_dir = {str(self.path)!r} holds a run already, and nothing of it is overwritten\n"
                "  --resume goes on with it; another --run_dir keeps both"
            )

    def create(self, job: str, step: int) -> None:
        """Makes the folder and writes its job; metrics after `step` (of a run that goes on) are dropped."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"run_dir = {str(self.path)!r} cannot be made: {error.strerror}\n  choose a folder you can write to"
            ) from error
        write_whole(self.path / "job.toml", job)
        truncate_metrics(self.path / "metrics.jsonl", step)
        try:
            self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise DataError(f"{self.path / 'metrics.jsonl'} cannot be written: {error.strerror}") from error

    def log(self, row: dict[str, Any]) -> None:
        """One line of metrics.jsonl, handed to the operating system at once."""
        assert self._metrics is not None, "create comes first"
        try:
            self._metrics.write(json.dumps(row) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise DataError(f"{self.path / 'metrics.jsonl'} cannot be written: {error.strerror}") from error

    def write(self, name: str, content: dict[str, Any]) -> None:
        """A JSON file of the run."""
        write_whole(self.path / name, json.dumps(content, indent=1) + "\n")
