"""The token stream: the tokens of every document, each ended by the separator, in one memory-mapped file.

A corpus is tokenised once. The stream is kept in the cache under a key of the tokenizer and of each
document's path, size and time of change; `KEY.tokens` holds the ids and `KEY.json` what should be there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thrice.data.corpus import Document, pieces
from thrice.data.tokenizer import BYTE, Tokenizer, bpe_size, documents_key, known_tokenizer
from thrice.errors import DataError
from thrice.files import written_whole

# Part of each key: raise it when the same text and tokenizer would give another stream.
_FORMAT = "1"


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    tokens: NDArray[Any]
    """1-D, read-only, memory-mapped; uint8, uint16 or uint32, the smallest that holds the vocabulary."""
    documents: int
    bytes: int
    """Of text, before it was tokenised."""
    fingerprint: str
    """sha256 of the ids as they are stored: equal streams, equal fingerprints."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is known of a corpus before anything is tokenised."""

    documents: int
    bytes: int
    vocabulary: int
    cached: bool
    """Whether the token stream is in the cache."""
    tokens: int | None
    """None where they are only known once they are counted."""


def token_store(documents: Sequence[Document], tokenizer: Tokenizer, cache: Path) -> TokenStore:
    """The token stream of `documents`: from the cache, or tokenised into it, in bounded memory.

    Raises DataError for what is not text, and for a cache folder that cannot be written or is full.
    """
    path = _path(documents, tokenizer, cache)
    store = _cached(path, tokenizer)
    if store is None:
        _tokenise(documents, tokenizer, path, cache)
        store = _cached(path, tokenizer)
    if store is None:
        raise DataError(
            f"{path}: does not hold what was just written to it\n"
            "  → run again; if it stays so, set THRICE_CACHE to a folder on another disk"
        )
    return store


def survey(spec: str, documents: Sequence[Document], cache: Path) -> Survey:
    """What can be said without training, tokenising or writing. Raises ConfigError like `tokenizer_for`."""
    tokenizer = known_tokenizer(spec, documents, cache)
    store = _cached(_path(documents, tokenizer, cache), tokenizer) if tokenizer else None
    bytes_ = sum(document.size_bytes for document in documents)
    tokens = len(store) if store else bytes_ + len(documents) if spec == BYTE else None
    return Survey(
        documents=len(documents),
        bytes=bytes_,
        vocabulary=tokenizer.vocabulary if tokenizer else bpe_size(spec),
        cached=store is not None,
        tokens=tokens,
    )


def _path(documents: Sequence[Document], tokenizer: Tokenizer, cache: Path) -> Path:
    return cache / "tokens" / f"{documents_key(documents, _FORMAT, tokenizer.fingerprint)}.tokens"


def _dtype(vocabulary: int) -> np.dtype[Any]:
    return np.dtype("u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4")


def _cached(path: Path, tokenizer: Tokenizer) -> TokenStore | None:
    """The entry at `path`; None where there is none or it is damaged."""
    dtype = _dtype(tokenizer.vocabulary)
    try:
        meta = json.loads(path.with_suffix(".json").read_bytes())
        if path.stat().st_size != meta["tokens"] * dtype.itemsize:
            return None
        return TokenStore(
            # A plain view of the map: indexing np.memmap itself costs several microseconds more.
            tokens=np.asarray(np.memmap(path, dtype=dtype, mode="r")),
            documents=meta["documents"],
            bytes=meta["bytes"],
            fingerprint=meta["fingerprint"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tokenise(documents: Sequence[Document], tokenizer: Tokenizer, path: Path, cache: Path) -> None:
    fix = f"free space in {cache}, or set THRICE_CACHE to another folder"
    dtype = _dtype(tokenizer.vocabulary)
    separator = np.array([tokenizer.separator], dtype=dtype)
    digest = hashlib.sha256()
    tokens = 0
    with written_whole(path, fix) as file:
        for piece, ends in pieces(documents):
            encoded = tokenizer.encode(piece).astype(dtype, copy=False)
            for ids in (encoded, separator) if ends else (encoded,):
                digest.update(ids.data)
                file.write(ids.data)
                tokens += len(ids)
    meta = {
        "tokens": tokens,
        "documents": len(documents),
        "bytes": sum(document.size_bytes for document in documents),
        "fingerprint": digest.hexdigest(),
    }
    # Last: without it the entry counts as absent. Two builders of one key write the same bytes.
    with written_whole(path.with_suffix(".json"), fix) as file:
        file.write(json.dumps(meta).encode())
