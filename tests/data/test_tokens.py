import hashlib
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from thrice.data.corpus import Document, corpus_of
from thrice.data.tokenizer import ByteTokenizer, tokenizer_for
from thrice.data.tokens import survey, token_store
from thrice.errors import ConfigError, DataError


class Counting(ByteTokenizer):
    """The byte tokenizer, which tells how many bytes it was given."""

    def __init__(self) -> None:
        self.seen_bytes = 0

    def encode(self, text: bytes) -> np.ndarray:
        self.seen_bytes += len(text)
        return super().encode(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.txt").write_text(f"document {i} \u20ac\n" * (i + 1))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def documents_in(folder: Path) -> tuple[Document, ...]:
    return corpus_of([str(folder)]).documents


def test_the_stream_is_every_document_and_a_separator_after_each(folder: Path, cache: Path) -> None:
    documents = documents_in(folder)
    store = token_store(documents, ByteTokenizer(), cache)
    expected = b"".join(document.path.read_bytes() + b"\0" for document in documents)
    assert store.tokens.tobytes() == expected
    assert store.tokens.dtype == np.uint8
    assert not store.tokens.flags.writeable
    assert (len(store), store.documents, store.bytes) == (len(expected), 5, len(expected) - 5)
    assert store.fingerprint == hashlib.sha256(expected).hexdigest()


@pytest.mark.parametrize(("size", "dtype", "gap"), [(257, "<u2", 0), (300, "<u2", 0), (300, "<u4", 70_000)])
def test_ids_take_the_smallest_type(folder: Path, cache: Path, size: int, dtype: str, gap: int) -> None:
    documents = documents_in(folder)
    trained = tokenizer_for("bpe:257", documents, cache)
    described = json.loads((trained.save(folder.parent) or Path()).read_text())
    for i in range(257, size):
        described["added_tokens"].append({**described["added_tokens"][0], "id": i, "content": f"<{i}>"})
    for entry in list(described["model"]["vocab"]) if gap else ():
        if described["model"]["vocab"][entry] == 256:
            described["model"]["vocab"][entry] += gap
    path = folder.parent / "tokenizer.json"
    path.write_text(json.dumps(described))
    tokenizer = tokenizer_for(str(path), (), cache)
    store = token_store(documents, tokenizer, cache)
    assert store.tokens.dtype == np.dtype(dtype)
    text = "".join(document.path.read_text() + "<|endoftext|>" for document in documents)
    assert tokenizer.decode(store.tokens) == text


def test_it_is_tokenised_once(folder: Path, cache: Path) -> None:
    first = Counting()
    store = token_store(documents_in(folder), first, cache)
    assert first.seen_bytes == store.bytes
    again = Counting()
    assert token_store(documents_in(folder), again, cache).fingerprint == store.fingerprint
    assert again.seen_bytes == 0


def test_it_is_tokenised_again_when_a_file_changes(folder: Path, cache: Path) -> None:
    before = token_store(documents_in(folder), ByteTokenizer(), cache)
    file = folder / "0.txt"
    status = file.stat()
    file.write_text(file.read_text().upper())  # as many bytes
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    after = Counting()
    assert token_store(documents_in(folder), after, cache).fingerprint != before.fingerprint
    assert after.seen_bytes > 0


@pytest.mark.parametrize("damage", ["truncated", "longer", "no tokens", "no meta", "meta cut", "meta odd"])
def test_a_damaged_entry_is_rebuilt(folder: Path, cache: Path, damage: str) -> None:
    documents = documents_in(folder)
    good = token_store(documents, ByteTokenizer(), cache)
    (tokens,) = (cache / "tokens").glob("*.tokens")
    meta = tokens.with_suffix(".json")
    expected = good.tokens.tobytes()
    match damage:
        case "truncated":
            tokens.write_bytes(expected[:-1])
        case "longer":
            tokens.write_bytes(expected + b"x")
        case "no meta":
            meta.unlink()
        case "meta cut":
            meta.write_bytes(meta.read_bytes()[:10])
        case "meta odd":
            meta.write_text("[]")
        case "no tokens":
            tokens.unlink()
    assert not survey("byte", documents, cache).cached
    again = Counting()
    assert token_store(documents, again, cache).tokens.tobytes() == expected
    assert again.seen_bytes == good.bytes


def test_junk_leaves_nothing_in_the_cache(folder: Path, cache: Path) -> None:
    for name in ("x.txt", "y.txt"):
        (folder / name).write_bytes(b"fine, then \xff")
    with pytest.raises(DataError, match=r"(?s)[xy]\.txt: not UTF-8.*byte 11 .*[xy]\.txt: not UTF-8"):
        token_store(documents_in(folder), ByteTokenizer(), cache)
    assert list((cache / "tokens").iterdir()) == []


def test_a_cache_that_cannot_be_written_names_the_way_out(folder: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be: this stops root too")
    with pytest.raises(DataError, match=r"(?s)cache.*cannot be written.*THRICE_CACHE") as caught:
        token_store(documents_in(folder), ByteTokenizer(), cache)
    assert str(cache) in str(caught.value)


def test_memory_is_bounded(tmp_path: Path, cache: Path) -> None:
    size_bytes = 30_000_000
    for name, line in (("lines", b"a line of text\n"), ("one line", b"x")):
        (tmp_path / name).write_bytes((line * (size_bytes // len(line) + 1))[:size_bytes])
    for name in ("lines", "one line"):
        documents = corpus_of([str(tmp_path / name)]).documents
        tracemalloc.start()
        store = token_store(documents, ByteTokenizer(), cache)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(store) == size_bytes + 1
        # A block of 1 MiB, what was left of the one before, both joined, the piece, and its text.
        assert peak_bytes < 8 << 20


BUILD = """
import os, signal, sys
from pathlib import Path
from thrice.data.corpus import corpus_of
from thrice.data.tokenizer import ByteTokenizer
from thrice.data.tokens import token_store

class Doomed(ByteTokenizer):
    pieces = 0

    def encode(self, text):
        self.pieces += 1
        if self.pieces == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text)

documents = corpus_of([sys.argv[1]]).documents
print("ready", flush=True)
sys.stdin.readline()
tokenizer = Doomed() if sys.argv[3] == "killed" else ByteTokenizer()
print(token_store(documents, tokenizer, Path(sys.argv[2])).fingerprint)
"""


def builder(folder: Path, cache: Path, end: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(folder), str(cache), end]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_builders_of_one_entry_end_well(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a line of text\n" * 500_000)
    started = [builder(tmp_path / "a.txt", cache, "well") for _ in range(2)]
    for process in started:  # both are up and waiting: they begin together
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    known = Counting()
    store = token_store(documents_in(tmp_path / "a.txt"), known, cache)
    assert known.seen_bytes == 0
    assert said == [store.fingerprint] * 2
    assert len(list((cache / "tokens").iterdir())) == 2


def test_a_killed_builder_leaves_nothing_that_is_taken_for_whole(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a line of text\n" * 300_000)
    process = builder(tmp_path / "a.txt", cache, "killed")
    process.communicate("go\n", timeout=60)
    assert process.returncode == -signal.SIGKILL
    (left,) = (cache / "tokens").iterdir()
    assert ".tmp-" in left.name
    assert left.stat().st_size > 0
    documents = documents_in(tmp_path / "a.txt")
    assert not survey("byte", documents, cache).cached
    assert len(token_store(documents, ByteTokenizer(), cache)) == 15 * 300_000 + 1


def test_a_survey_writes_nothing_and_knows_what_can_be_known(folder: Path, cache: Path) -> None:
    documents = documents_in(folder)
    before = survey("byte", documents, cache)
    assert not cache.exists()
    store = token_store(documents, ByteTokenizer(), cache)
    after = survey("byte", documents, cache)
    assert (before.cached, after.cached) == (False, True)
    assert before.tokens == after.tokens == len(store)
    assert (before.documents, before.bytes, before.vocabulary) == (5, store.bytes, 256)
    with pytest.raises(ConfigError, match="tokenizer"):
        survey("bite", documents, cache)


def test_a_survey_of_merges(folder: Path, cache: Path) -> None:
    documents = documents_in(folder)
    untrained = survey("bpe:260", documents, cache)
    assert (untrained.vocabulary, untrained.cached, untrained.tokens) == (260, False, None)
    assert not cache.exists()
    tokenizer = tokenizer_for("bpe:260", documents, cache)
    assert survey("bpe:260", documents, cache).tokens is None
    store = token_store(documents, tokenizer, cache)
    known = survey("bpe:260", documents, cache)
    assert (known.vocabulary, known.cached, known.tokens) == (260, True, len(store))
