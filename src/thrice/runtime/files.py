"""Small files written whole or not at all, and temporaries whose writers may be killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from thrice.errors import DataError


def write_whole(path: str | Path, data: bytes | str) -> None:
    """Write a small file so that a reader finds the old content or all of the new. Raises DataError."""
    path = Path(path)
    raw = data.encode() if isinstance(data, str) else data
    temporary = temporary_beside(path)
    try:
        sweep(path.parent, f".{path.name}.tmp-")
        with temporary.open("xb") as file, claimed(temporary):
            file.write(raw)
            sync(file)
            os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise unwritten(str(path), path.parent, len(raw), error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def truncate_metrics(path: str | Path, rows: int) -> int:
    """Keep the first `rows` whole rows of a metrics.jsonl; later rows and torn lines go. Raises DataError.

    Returns how many are there then, which is fewer where a crash of the machine took the last ones.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror} → check its permissions") from error
    kept = [line for line in lines if _is_row(line)][:rows]
    write_whole(path, b"".join(line + b"\n" for line in kept))
    return len(kept)


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """A new name is on the disk only once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritten(what: str, folder: Path, needed_bytes: int, error: OSError) -> DataError:
    """The error for `what` that could not be written, with the bytes needed and free, and the fix."""
    fix = {
        errno.ENOSPC: "free some space, lower checkpoint.keep_last or choose another run_dir",
        errno.EDQUOT: "free some of your quota, lower checkpoint.keep_last or choose another run_dir",
        errno.EFBIG: "raise the limit on the size of a file (ulimit -f) or choose another run_dir",
    }.get(error.errno or 0, "make the folder writable or choose another run_dir")
    try:
        free = f"{shutil.disk_usage(folder).free:,}"
    except OSError:
        free = "an unknown number"
    return DataError(
        f"{what} cannot be written to {folder}: {error.strerror or error}. It needs {needed_bytes:,} bytes "
        f"and {free} are free; what was saved before is intact.\n    → {fix}"
    )


def temporary_beside(path: Path) -> Path:
    """A new hidden name for what will become `path`."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def claimed(temporary: Path) -> Iterator[bool]:
    """Hold the lock of a temporary, which the kernel drops when its writer dies.

    False where a live process holds it, or where the filesystem has no locks.
    """
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
        except OSError:
            is_ours = False
        yield is_ours
    finally:
        os.close(descriptor)


def sweep(folder: Path, prefix: str) -> None:
    """Remove the temporaries whose writer is gone; those of a live one stay."""
    for path in folder.iterdir():
        if path.name.startswith(prefix) and ".tmp-" in path.name:
            with suppress(OSError), claimed(path) as is_ours:
                if is_ours and path.is_dir():
                    shutil.rmtree(path)
                elif is_ours:
                    path.unlink()
