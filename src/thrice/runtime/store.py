"""The checkpoints of a run on disk, each whole or not there at all.

    latest                                the newest checkpoint's path from the run folder, as text
    checkpoints/step-00001000/GROUP.safetensors   one file for each group of tensors (tensorfile.py)
                              state.json          what is not a tensor
                              manifest.json       bytes and SHA-256 of each file, and its own; written last

A checkpoint is written to a hidden folder beside its place, synced, then renamed: a process killed at any
moment leaves the earlier ones as they were. Nothing is pickled, so loading runs no code. The sums show damage
and changes; they are no signature.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from thrice.errors import CheckpointError
from thrice.files import claimed, sweep, sync_folder, temporary_beside, unwritten, write_whole
from thrice.runtime import tensorfile

FORMAT = "thrice-checkpoint"
VERSION = 1

_STEP = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"\.(step-\d{8,})\.old")
_ANOTHER = "resume from another checkpoint"
_CHECK = "check the path, the disk and the permissions"


def save(
    folder: str | Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    keep_last: int,
) -> Path:
    """Write the checkpoint of `step` (optimizer steps taken) into `folder`, then remove the oldest ones.

    `tensors` maps a group to its named tensors: any shape and strides, any dtype safetensors has, any device.
    They come to the host one at a time: the extra memory is that of the largest tensor on a device or not
    contiguous, else none. Each name is saved in full: two names of one storage come back as two tensors of
    the same values. `state` is JSON with string keys; tuples come back as lists.

    A checkpoint of the same step is replaced. `keep_last` (at least 1) checkpoints up to this step stay, and
    those of later steps. Only checkpoints of ours with all their files are ever removed: a damaged
    one, or what is not ours, stays, renamed to `step-N.damaged-…` where it is in the way. Leftovers of a
    killed writer go, never those of a live one; on a filesystem without locks, where that cannot be told,
    they stay.

    Raises DataError with the bytes needed and free, the earlier checkpoints intact; CheckpointError, before
    anything is written, for a tensor that cannot be saved.
    """
    folder = Path(folder)
    target = path_of(folder, step)
    files = {f"{group}.safetensors": tensorfile.layout(group, named) for group, named in tensors.items()}
    files["state.json"] = [json.dumps(state, indent=1).encode()]
    pieces = [piece for file in files.values() for piece in file]
    needed_bytes = sum(piece.nbytes if isinstance(piece, Tensor) else len(piece) for piece in pieces)
    temporary = temporary_beside(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        if shutil.disk_usage(folder).free < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary.mkdir()
        with claimed(temporary):
            entries = {name: tensorfile.write(temporary / name, file) for name, file in files.items()}
            tensorfile.write(temporary / "manifest.json", [_sealed(step, entries)])
            sync_folder(temporary)
            _put_in_place(temporary, target)
        write_whole(folder.parent / "latest", f"{folder.name}/{target.name}\n")
    except OSError as error:
        what = f"the checkpoint of step {step}"
        raise unwritten(what, folder, error, needed_bytes=needed_bytes) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    older = [path for path in _newest_first(folder) if _step_of(path.name) < step and _is_ours(path)]
    for path in older[keep_last - 1 :]:
        _discard(path)
    return target


def path_of(folder: Path, step: int) -> Path:
    """Where in `folder` the checkpoint of `step` is."""
    return folder / f"step-{step:08d}"


def load(path: str | Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """(tensors by group and name, on the host; state) of the checkpoint folder `path`, every byte checked.

    Raises CheckpointError, which names the file and what is wrong with it.
    """
    path = Path(path)
    tensors: dict[str, dict[str, Tensor]] = {}
    state: dict[str, Any] = {}
    step, files = _manifest(path)
    if _STEP.fullmatch(path.name) and _step_of(path.name) != step:
        raise _rejected(path, "manifest.json", f"is of step {step}", f"rename the folder to step-{step:08d}")
    for name, (size_bytes, written) in files.items():
        try:
            if name == "state.json":
                raw = (path / name).read_bytes()
                found, state = hashlib.sha256(raw).hexdigest(), json.loads(raw)
            else:
                group = name.removesuffix(".safetensors")
                tensors[group], found = tensorfile.read(path / name, size_bytes)
        except ValueError:
            found = "no file of ours"
        except OSError as error:
            raise _rejected(path, name, f"cannot be read: {error.strerror}", _CHECK) from error
        if found != written:
            raise _rejected(path, name, "does not hold the bytes that were written: changed, or a bad disk")
    return tensors, state


def latest(folder: str | Path) -> tuple[Path | None, list[str]]:
    """(the checkpoint of the highest step that loads, or None; one line for each later one that does not).

    Raises CheckpointError where `folder` itself cannot be read.
    """
    rejected = []
    for path in _newest_first(Path(folder)):
        try:
            load(path)
        except CheckpointError as error:
            rejected.append(str(error))
        else:
            return path, rejected
    return None, rejected


def _put_in_place(temporary: Path, target: Path) -> None:
    """Give a whole checkpoint its name; what was there can be loaded until then (see `_newest_first`)."""
    aside = target.with_name(f".{target.name}.old")
    if os.path.lexists(target):
        os.rename(target, aside if _is_ours(target) else f"{target}.damaged-{secrets.token_hex(4)}")
    os.rename(temporary, target)
    sync_folder(target.parent)
    if aside.exists():
        _discard(aside)


def _tidy(folder: Path) -> None:
    """Finish what killed writers began: their temporaries go; a checkpoint set aside comes back, or goes."""
    sweep(folder, ".step-")
    for path in list(folder.iterdir()):
        aside = _ASIDE.fullmatch(path.name)
        if aside and os.path.lexists(folder / aside[1]):
            _discard(path)
        elif aside:
            os.rename(path, folder / aside[1])


def _discard(path: Path) -> None:
    """Remove a checkpoint. Failing to stops no training: the next save tries again."""
    gone = temporary_beside(path.with_name(path.name.removeprefix(".")))
    with suppress(OSError):
        os.rename(path, gone)
        shutil.rmtree(gone)


def _newest_first(folder: Path) -> list[Path]:
    """What may be a checkpoint; one that a killed writer set aside counts where its place is empty."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror} → {_CHECK}") from error
    # "." sorts before "s": the one in its place wins.
    names = [name for name in names if _STEP.fullmatch(name) or _ASIDE.fullmatch(name)]
    steps = {_step_of(name): folder / name for name in names}
    return [steps[step] for step in sorted(steps, reverse=True)]


def _step_of(name: str) -> int:
    found = _STEP.search(name)
    assert found is not None, name
    return int(found[1])


def _is_ours(path: Path) -> bool:
    """Whether this is a folder that we wrote, with all its files in their sizes and no other."""
    try:
        _manifest(path)
    except CheckpointError:
        return False
    return not path.is_symlink()


def _sealed(step: int, files: Mapping[str, tuple[int, str]]) -> bytes:
    """The manifest with its own sum: one text for one content, so that any other byte shows."""
    entries = {name: {"bytes": size_bytes, "sha256": sha256} for name, (size_bytes, sha256) in files.items()}
    body = {"format": FORMAT, "version": VERSION, "step": step, "files": entries}
    sha256 = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, "sha256": sha256}, indent=1).encode() + b"\n"


def _manifest(path: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """(step, file → (bytes, SHA-256)) of a checkpoint whose files are all there, in the sizes written."""
    try:
        present = set(os.listdir(path))
        if "manifest.json" not in present:
            raise _rejected(path, "manifest.json", "is missing: not a whole checkpoint of thrice")
        step, files = _unsealed(path, (path / "manifest.json").read_bytes())
        for name in sorted(present - set(files) - {"manifest.json"}):
            raise _rejected(path, name, "is not one of its files", "move it out of the folder")
        for name, (size_bytes, _) in files.items():
            if name not in present:
                raise _rejected(path, name, "is missing")
            found_bytes = (path / name).stat().st_size
            if found_bytes != size_bytes:
                raise _rejected(path, name, f"has {found_bytes:,} bytes, {size_bytes:,} were written")
    except OSError as error:
        file = Path(error.filename or path)
        raise _rejected(file.parent, file.name, f"cannot be read: {error.strerror}", _CHECK) from error
    return step, files


def _unsealed(path: Path, raw: bytes) -> tuple[int, dict[str, tuple[int, str]]]:
    """What a manifest says, if it is as it was written."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise _rejected(path, "manifest.json", f"is not JSON ({error})") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise _rejected(path, "manifest.json", f"has no format {FORMAT!r}: not a checkpoint of thrice")
    if body.get("version") != VERSION:
        why = f"has format version {body.get('version')!r}, this thrice reads {VERSION}"
        raise _rejected(path, "manifest.json", why, "use the thrice that wrote it")
    try:
        step = int(body["step"])
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in body["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        step, files = 0, {}
    if _sealed(step, files) != raw:
        raise _rejected(path, "manifest.json", "is not as it was written")
    return step, files


def _rejected(path: Path, name: str, why: str, fix: str = _ANOTHER) -> CheckpointError:
    pickled = " (a pickle, which thrice never loads)" if _is_pickle(path / name) else ""
    return CheckpointError(f"{path}: {name}{pickled} {why} → {fix}")


def _is_pickle(file: Path) -> bool:
    """Whether it looks like what torch.save or pickle writes; for messages only."""
    head = b""
    with suppress(OSError), file.open("rb") as source:
        head = source.read(4)
    # A zip, or a pickle of protocol 2 to 5. In a safetensors file of a short header the third byte is 0.
    return re.match(rb"PK\x03\x04|\x80[\x02-\x05][^\x00]", head, re.DOTALL) is not None
