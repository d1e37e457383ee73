"""Which documents: from the job's `data` to an ordered list of text files, and their bytes in pieces.

An entry of `data` is a file, a folder, a pattern (`*`, `?`, `[...]`, and `**` for folders at any depth), or
the word "stdlib". Relative paths start at the working folder.

- A **file** or what a **pattern** matches is taken as it is; if it is not text, that is an error.
- A **folder** means its text files at any depth. Left out are hidden files and folders, what is not a regular
  file, and files that are not text by git's rule: a NUL among the first 8,000 bytes. The last are listed.
- **"stdlib"** is the Python standard library's own `.py` source, without its tests.

A file that two entries match is one document. An empty file holds nothing to learn and is left out. Documents
are laid in the order of a hash of their names, so that the end of the stream is a fair sample of all of it.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from thrice.errors import DataError

STDLIB = "stdlib"
_NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_SNIFFED_BYTES = 8_000
_PIECE_BYTES = 1 << 20
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text file as it was found. A file that changes afterwards is refused when it is read."""

    path: Path
    """Absolute."""
    name: str
    """Relative to the folder, or to the fixed part of the pattern, it came from; moving that keeps it."""
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class Corpus:
    documents: tuple[Document, ...]
    """In the order of the stream."""
    not_text: tuple[Path, ...]
    """Files of a named folder that were left out because they are not text."""


def corpus_of(data: Sequence[str]) -> Corpus:
    """The documents that `data` names.

    Raises DataError, naming up to five at once, for what is missing, matches nothing, cannot be read or holds
    no text; and where everything together is empty.
    """
    faults: list[str] = []
    found: dict[tuple[int, int], Document] = {}
    not_text: list[Path] = []
    for entry in data:
        root, paths, strict = _files(entry, faults)
        for path in paths:
            try:
                status = path.stat()
                document = _document(path, root, status, strict)
            except OSError as error:
                faults.append(str(_unreadable(path, error)))
                continue
            except DataError as fault:
                faults.append(str(fault))
                continue
            if document is None:
                not_text.append(path)
            elif document.size_bytes:
                found.setdefault((status.st_dev, status.st_ino), document)
    _raise(faults)
    if not found:
        raise DataError(
            f"the corpus is empty: data = {list(data)!r} holds 0 bytes of text\n"
            '  → name files with text in them, or data = ["stdlib"] to try thrice'
        )
    # Equal names, from two folders, keep the order of `data`: sorting is stable.
    ordered = sorted(found.values(), key=lambda document: hashlib.sha256(os.fsencode(document.name)).digest())
    return Corpus(documents=tuple(ordered), not_text=tuple(not_text))


def pieces(documents: Sequence[Document]) -> Iterator[tuple[bytes, bool]]:
    """Each document's bytes in pieces of 1 to 2 MiB at most, and with each whether it ends its document.

    A piece ends after a newline where it holds one, and never inside a character. Once a document is refused
    no more pieces come; the rest is read only to name up to five that are wrong, in one DataError.
    """
    faults: list[str] = []
    for document in documents:
        try:
            for piece in _read(document):
                if not faults:
                    yield piece
        except DataError as fault:
            faults.append(str(fault))
            if len(faults) == _MOST_NAMED:
                break
    _raise(faults)


def _raise(faults: list[str]) -> None:
    if faults:
        more = f"\n…and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
        raise DataError("\n".join(faults[:_MOST_NAMED]) + more)


def _files(entry: str, faults: list[str]) -> tuple[Path, list[Path], bool]:
    """The folder that names are relative to, the files, and whether each must be text."""
    path = Path(entry).expanduser()
    if entry == STDLIB:
        path = Path(sysconfig.get_path("stdlib"))
        sources = [source for source in _walk(path, faults, _NOT_STDLIB) if source.suffix == ".py"]
        if not sources:
            faults.append(
                f'"{STDLIB}": this Python keeps no source of its standard library in {path}\n'
                "  → name text files or folders of your own"
            )
        return path, sources, False
    if os.path.isdir(path):
        return path, list(_walk(path, faults)), False
    try:
        return *_named(entry, path), True
    except DataError as fault:
        faults.append(str(fault))
        return path, [], True


def _named(entry: str, path: Path) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the file that `path` is or the files that it matches."""
    if os.path.lexists(path):
        return path.parent, [path]
    parts = path.parts
    fixed = next((at for at, part in enumerate(parts) if any(sign in part for sign in "*?[")), len(parts))
    if fixed == len(parts):
        raise DataError(
            f"{entry}: no such file or folder (looked for {path.absolute()})\n"
            "  → correct the path; a relative one starts at the working folder"
        )
    root = Path(*parts[:fixed])
    if not root.is_dir():
        raise DataError(f"{entry}: matches nothing, because there is no folder {root.absolute()}\n  → correct the path")
    matched = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    files = [match for match in matched if not match.is_dir()]
    if not files:
        also = " (it matches folders, and a pattern takes files only)" if matched else ""
        raise DataError(
            f"{entry}: matches no file in {root.absolute()}{also}\n"
            "  → correct the pattern; ** stands for folders at any depth, and hidden files are not matched"
        )
    return root, files


def _walk(root: Path, faults: list[str], left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below `root` that are not hidden; linked folders are followed, each real folder once."""
    seen = {os.path.realpath(root)}

    def unlisted(error: OSError) -> None:
        faults.append(f"{error.filename}: cannot be listed: {error.strerror}\n  → change its permissions")

    for folder, folders, files in os.walk(root, followlinks=True, onerror=unlisted):
        kept = []
        for name in sorted(folders):
            real = os.path.realpath(os.path.join(folder, name))
            if not name.startswith(".") and name not in left_out and real not in seen:
                seen.add(real)
                kept.append(name)
        folders[:] = kept
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _document(path: Path, root: Path, status: os.stat_result, strict: bool) -> Document | None:
    """The file as a document; None where it is not text and not `strict`. Raises OSError."""
    if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
        if strict:
            raise DataError(f"{path}: is not a regular file\n  → leave it out of data")
        return None
    with path.open("rb") as file:
        start = file.read(0 if strict else _SNIFFED_BYTES)
    if b"\0" in start:
        return None
    return Document(
        path=path.absolute(),
        name=path.relative_to(root).as_posix(),
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def _read(document: Document) -> Iterator[tuple[bytes, bool]]:
    path = document.path
    try:
        with path.open("rb") as file:
            rest, offset, ends = b"", 0, False
            while not ends:
                new = file.read(_PIECE_BYTES)
                ends = len(new) < _PIECE_BYTES
                block = rest + new
                whole = _checked(block, path, offset, ends)
                cut = len(block) if ends else block.rfind(b"\n", 0, whole) + 1 or whole
                yield block[:cut], ends
                rest, offset = block[cut:], offset + cut
            status = os.fstat(file.fileno())
    except OSError as error:
        raise _unreadable(path, error) from error
    if (status.st_size, status.st_mtime_ns) != (document.size_bytes, document.mtime_ns):
        raise DataError(
            f"{path}: changed since it was found ({document.size_bytes:,} bytes then, {status.st_size:,} now)"
            "\n  → run again once nothing writes to it"
        )


def _checked(block: bytes, path: Path, offset: int, ends: bool) -> int:
    """How many bytes of `block` are whole characters; DataError where they are not text."""
    nul = block.find(b"\0")
    if nul >= 0:
        raise DataError(
            f"{path}: not text: byte {offset + nul:,} is NUL (0x00)\n"
            "  → leave the file out of data; if it is UTF-16 text, convert it: iconv -f UTF-16 -t UTF-8"
        )
    try:
        return codecs.utf_8_decode(block, "strict", ends)[1]
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 text: byte {offset + error.start:,} is 0x{block[error.start]:02x} "
            f"({error.reason})\n"
            "  → leave the file out of data, or convert it, for example: iconv -f LATIN1 -t UTF-8"
        ) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read: {error.strerror}\n  → change its permissions, or leave it out of data")
