"""Where derived files are kept, and how any of them is written: whole or not at all."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from thrice.errors import DataError

_ABANDONED_S = 3600.0


def cache_folder() -> Path:
    """$THRICE_CACHE, else $XDG_CACHE_HOME/thrice, else ~/.cache/thrice. It need not exist yet."""
    if chosen := os.environ.get("THRICE_CACHE"):
        return Path(chosen).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "thrice"
    return Path.home() / ".cache" / "thrice"


@contextmanager
def written_whole(path: Path, fix: str) -> Iterator[BinaryIO]:
    """A file to write, which takes its place at `path` when the block ends well and is removed otherwise.

    Whoever reads `path` at any moment, also after a kill at any moment, sees the old file or the new one.
    Several processes may write one path; the last to finish stays. What a killed process left beside it is
    removed once it is an hour old. Raises DataError with `fix` when the folder cannot be written or is full.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):  # what made the folder unusable is what is reported
            temporary.unlink()
        if isinstance(error, OSError):
            raise DataError(f"{path.parent}: cannot be written: {error.strerror}\n  → {fix}") from error
        raise


def _remove_abandoned(path: Path) -> None:
    for left in path.parent.glob(f"{path.name}.*.tmp"):
        with suppress(FileNotFoundError):  # another process may remove it first
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                left.unlink()
