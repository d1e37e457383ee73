"""Files written whole or not at all, and temporaries whose writers may be killed."""

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
from typing import IO, BinaryIO

from thrice.errors import DataError


@contextmanager
def written_whole(path: Path, fix: str | None = None) -> Iterator[BinaryIO]:
    """A file to write, which takes its place at `path` when the block ends well and is removed otherwise.

    Whoever reads `path` at any moment, also after a kill at any moment, finds the old file or the new one. Several
    processes may write one path; the last to finish stays. Raises DataError, with `fix` where the caller knows one.
    """
    temporary = temporary_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent, f".{path.name}.tmp-")
        with temporary.open("xb") as file, claimed(temporary):
            yield file
            sync(file)
            os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise unwritten(str(path), path.parent, error, fix=fix) from error
    finally:
        with suppress(OSError):  # what made the folder unusable is what is reported
            temporary.unlink()


def write_whole(path: str | Path, data: bytes | str) -> None:
    """Write a small file so that a reader finds the old content or all of the new. Raises DataError."""
    with written_whole(Path(path)) as file:
        file.write(data.encode() if isinstance(data, str) else data)


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


def unwritten(
    what: str, folder: Path, error: OSError, *, needed_bytes: int | None = None, fix: str | None = None
) -> DataError:
    """The error for `what` that could not be written, with the bytes needed (where known) and free, and the fix."""
    fixes = {
        errno.ENOSPC: "free some space, lower checkpoint.keep_last or choose another run_dir",
        errno.EDQUOT: "free some of your quota, lower checkpoint.keep_last or choose another run_dir",
        errno.EFBIG: "raise the limit on the size of a file (ulimit -f) or choose another run_dir",
    }
    fix = fix or fixes.get(error.errno or 0, "make the folder writable or choose another run_dir")
    needed = "" if needed_bytes is None else f"it needs {needed_bytes:,} bytes, "
    try:
        free = f"{shutil.disk_usage(folder).free:,} bytes"
    except OSError:
        free = "an unknown number of bytes"
    return DataError(
        f"{what} cannot be written to {folder}: {error.strerror or error} ({needed}{free} are free); what was saved "
        f"before is intact\n    → {fix}"
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
