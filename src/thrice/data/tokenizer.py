"""What turns text into token ids: bytes themselves, or byte-pair merges of the `hf` extra."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thrice.data.corpus import Document, pieces
from thrice.errors import ConfigError, DataError, Problem
from thrice.files import written_whole

BYTE = "byte"
_BPE = "bpe:"
_SEPARATOR = "<|endoftext|>"
_SEPARATORS = (_SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]")
_LEAST_BPE = 257
# Merges are learned from this much of the stream at most. Its order is a hash's, so its beginning is a fair
# sample, and the distinct words of a corpus larger than memory need not fit in memory.
_TRAINING_BYTES = 1 << 30
_PART_CHARACTERS = 1 << 16

Ids = NDArray[Any]


class Tokenizer(Protocol):
    """Text to ids and back."""

    name: str
    """As the job asks for it."""
    vocabulary: int
    """Every id is below this."""
    separator: int
    """The id that ends each document in the stream, and that text itself never becomes."""
    fingerprint: str
    """Equal for two tokenizers only if they give the same ids."""

    def encode(self, text: bytes) -> Ids:
        """UTF-8 text to ids, 1-D, unsigned."""
        ...

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """What is not valid text becomes U+FFFD; a separator stays visible."""
        ...

    def save(self, folder: Path) -> Path | None:
        """Write `tokenizer.json` into `folder`, from which it loads again; None where nothing is needed."""
        ...


class ByteTokenizer:
    """A token is a byte. Byte 0, which text never holds, is the separator, so the vocabulary stays 256."""

    name = BYTE
    vocabulary = 256
    separator = 0
    fingerprint = BYTE

    def encode(self, text: bytes) -> Ids:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        # A model may have more than 256 rows; the others show as 0xff, which is never valid UTF-8.
        shown = np.minimum(np.asarray(ids, dtype=np.int64), 0xFF).astype(np.uint8)
        return shown.tobytes().decode(errors="replace")

    def save(self, folder: Path) -> None:
        return None


class SubwordTokenizer:
    """A `tokenizers.Tokenizer`, with what would add, cut or merge tokens behind one's back switched off."""

    def __init__(self, name: str, json_text: str) -> None:
        """Raises ConfigError where `json_text` is no tokenizer, or has nothing to separate documents with."""
        library = _library(name)
        try:
            self._inner = library.Tokenizer.from_str(json_text)
        except Exception as error:  # the library raises nothing narrower
            raise _refused(name, f"it is not a tokenizer.json: {error}") from error
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True  # "<|endoftext|>" in a text is text
        ids: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        separators = [token for token in _SEPARATORS if token in ids]
        if not separators:
            raise _refused(
                name,
                f"it has no token to separate documents with (looked for {', '.join(_SEPARATORS)})",
                f'add one: t = tokenizers.Tokenizer.from_file(PATH); t.add_special_tokens(["{_SEPARATOR}"]); '
                "t.save(PATH)",
            )
        self.name = name
        self.vocabulary = max(ids.values()) + 1
        self.separator = ids[separators[0]]
        self.fingerprint = hashlib.sha256(json_text.encode()).hexdigest()
        self._json_text = json_text

    def encode(self, text: bytes) -> Ids:
        # Parts are encoded side by side on all cores; one long text would be encoded on one.
        encodings = self._inner.encode_batch_fast(list(_parts(text.decode())), add_special_tokens=False)
        return np.array([token for encoding in encodings for token in encoding.ids], dtype=np.uint32)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return str(self._inner.decode(np.asarray(ids).tolist(), skip_special_tokens=False))

    def save(self, folder: Path) -> Path:
        path = folder / "tokenizer.json"
        with written_whole(path, "choose a run_dir that can be written") as file:
            file.write(self._json_text.encode())
        return path


def tokenizer_for(spec: str, documents: Sequence[Document], cache: Path) -> Tokenizer:
    """The tokenizer that `spec` names; a "bpe:SIZE" is trained on `documents` once and kept in `cache`.

    Raises ConfigError for a spec that names none, DataError where the documents do not yield SIZE tokens.
    """
    known = known_tokenizer(spec, documents, cache)
    if known is not None:
        return known
    size = bpe_size(spec)
    json_text = _train(spec, size, documents)
    path = _trained_path(size, documents, cache)
    with written_whole(path, f"free space in {cache}, or set THRICE_CACHE to another folder") as file:
        file.write(json_text.encode())
    return SubwordTokenizer(spec, json_text)


def known_tokenizer(spec: str, documents: Sequence[Document], cache: Path) -> Tokenizer | None:
    """The tokenizer that `spec` names, or None for a "bpe:SIZE" that is yet to be trained. Writes nothing."""
    if spec == BYTE:
        return ByteTokenizer()
    if spec.startswith(_BPE):
        size = bpe_size(spec)
        _library(spec)
        path = _trained_path(size, documents, cache)
        try:
            trained = SubwordTokenizer(spec, path.read_text(encoding="utf-8"))
        except (OSError, ValueError, ConfigError):  # none yet, or damaged: it is trained again
            return None
        return trained if trained.vocabulary == size else None
    path = Path(spec).expanduser()
    if not path.is_file():
        raise _refused(
            spec,
            f"it is neither a tokenizer's name nor a file ({path.absolute()})",
            f'"{BYTE}", "{_BPE}4096" (any size from {_LEAST_BPE}), or the path of a tokenizer.json',
        )
    try:
        return SubwordTokenizer(spec, path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(spec, f"{path.absolute()} cannot be read: {error}") from error


def documents_key(documents: Sequence[Document], *more: str) -> str:
    """Names what is derived from these very files, in this order, and from `more`; 32 hexadecimal digits."""
    digest = hashlib.sha256(json.dumps(more).encode())
    for document in documents:
        described = [str(document.path), document.size_bytes, document.mtime_ns]
        digest.update(json.dumps(described).encode())
    return digest.hexdigest()[:32]


def _trained_path(size: int, documents: Sequence[Document], cache: Path) -> Path:
    return cache / "tokenizers" / f"{documents_key(documents, f'{_BPE}{size}', str(_TRAINING_BYTES))}.json"


def _train(spec: str, size: int, documents: Sequence[Document]) -> str:
    library = _library(spec)
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_SEPARATOR],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_training_text(documents), trainer)
    reached = inner.get_vocab_size()
    if reached < size:
        total_bytes = sum(document.size_bytes for document in documents)
        raise DataError(
            f"tokenizer = {spec!r}: {total_bytes:,} bytes of data yield only {reached} tokens, not {size}\n"
            f'  → tokenizer = "{_BPE}{reached}" or smaller, or more data'
        )
    return str(inner.to_str())


def _training_text(documents: Sequence[Document]) -> Iterator[str]:
    taken_bytes = 0
    for piece, _ in pieces(documents):
        yield piece.decode()
        taken_bytes += len(piece)
        if taken_bytes >= _TRAINING_BYTES:
            return


def _parts(text: str) -> Iterator[str]:
    """`text` cut after newlines, where there are any, into parts of a bounded length."""
    start = 0
    while len(text) - start > _PART_CHARACTERS:
        limit = start + _PART_CHARACTERS
        end = text.rfind("\n", start, limit) + 1 or limit
        yield text[start:end]
        start = end
    yield text[start:]


def bpe_size(spec: str) -> int:
    """SIZE of a "bpe:SIZE", which is the vocabulary of the tokenizer trained for it."""
    digits = spec.removeprefix(_BPE)
    if not (digits.isascii() and digits.isdigit()):
        raise _refused(spec, f"{digits!r} is not a number of tokens", f'for example "{_BPE}4096"')
    if int(digits) < _LEAST_BPE:
        raise _refused(
            spec,
            f"{digits} tokens cannot hold the 256 bytes and the separator, which come before any merge",
            f'"{_BPE}SIZE" with SIZE of at least {_LEAST_BPE}, or "{BYTE}"',
        )
    return int(digits)


def _library(spec: str) -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise _refused(spec, "it needs the package `tokenizers`", 'pip install "thrice[hf]"') from error


def _refused(spec: str, why: str, fix: str = "") -> ConfigError:
    return ConfigError([Problem(key="tokenizer", value=spec, why=why, fix=fix)])
