import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from thrice.data import tokenizer as tokenizer_module
from thrice.data.corpus import Document, corpus_of
from thrice.data.tokenizer import ByteTokenizer, Tokenizer, known_tokenizer, tokenizer_for
from thrice.errors import ConfigError, DataError

WORDS = b"the quick brown fox jumps over the lazy dog while many other animals look on in wonder; " * 40


@pytest.fixture
def documents(tmp_path: Path) -> tuple[Document, ...]:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_bytes(WORDS)
    (folder / "b.txt").write_text("na\u00efve caf\u00e9s \u20ac \U0001f600\n" * 50)
    return corpus_of([str(folder)]).documents


def refusal(spec: str, documents: tuple[Document, ...], cache: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        tokenizer_for(spec, documents, cache)
    (problem,) = caught.value.problems
    assert problem.key == "tokenizer"
    assert problem.value == spec
    return str(problem)


def test_bytes_there_and_back() -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    assert (tokenizer.vocabulary, tokenizer.separator) == (256, 0)
    text = "na\u00efve \u20ac \U0001f600\n"
    ids = tokenizer.encode(text.encode())
    assert ids.dtype == np.uint8
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
    assert tokenizer.decode([104, 105, 0, 255, 300, 0xC3]) == "hi\0\ufffd\ufffd\ufffd"


@pytest.mark.parametrize("text", ["", "the quick", "unseen: \U0001f680 \u4e2d\r\n\t x", "<|endoftext|>"])
def test_merges_there_and_back(documents: tuple[Document, ...], tmp_path: Path, text: str) -> None:
    tokenizer = tokenizer_for("bpe:300", documents, tmp_path)
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.separator not in ids
    assert tokenizer.vocabulary == 300
    assert len(ids) == 0 or ids.max() < 300
    assert tokenizer.decode([tokenizer.separator]) == "<|endoftext|>"


def test_merges_shorten(documents: tuple[Document, ...], tmp_path: Path) -> None:
    tokenizer = tokenizer_for("bpe:320", documents, tmp_path)
    assert len(tokenizer.encode(WORDS)) < len(WORDS) / 2


def test_long_text_is_encoded_whole(documents: tuple[Document, ...], tmp_path: Path) -> None:
    tokenizer = tokenizer_for("bpe:300", documents, tmp_path)
    for text in ("line after line\n" * 20_000, "\u20ac" * 100_000):
        assert tokenizer.decode(tokenizer.encode(text.encode())) == text


def test_it_is_trained_once_and_again_when_damaged_or_when_the_data_change(
    documents: tuple[Document, ...], tmp_path: Path
) -> None:
    assert known_tokenizer("bpe:300", documents, tmp_path / "cache") is None
    assert not (tmp_path / "cache").exists()
    first = tokenizer_for("bpe:300", documents, tmp_path / "cache")
    (kept,) = (tmp_path / "cache" / "tokenizers").iterdir()
    written = kept.stat().st_mtime_ns
    assert tokenizer_for("bpe:300", documents, tmp_path / "cache").fingerprint == first.fingerprint
    assert kept.stat().st_mtime_ns == written
    kept.write_bytes(kept.read_bytes()[:500])
    assert known_tokenizer("bpe:300", documents, tmp_path / "cache") is None
    assert tokenizer_for("bpe:300", documents, tmp_path / "cache").fingerprint == first.fingerprint
    tokenizer_for("bpe:300", documents[:1], tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "tokenizers").iterdir())) == 2


def test_training_reads_a_bounded_part(
    documents: tuple[Document, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tokenizer_for("bpe:280", documents[:1], tmp_path)
    monkeypatch.setattr(tokenizer_module, "_TRAINING_BYTES", 1)
    assert tokenizer_for("bpe:280", documents, tmp_path).fingerprint == alone.fingerprint


def test_saved_it_loads_as_the_same(documents: tuple[Document, ...], tmp_path: Path) -> None:
    trained = tokenizer_for("bpe:300", documents, tmp_path / "cache")
    path = trained.save(tmp_path)
    assert path == tmp_path / "tokenizer.json"
    loaded = tokenizer_for(str(path), (), tmp_path / "cache")
    assert loaded.fingerprint == trained.fingerprint
    assert (loaded.vocabulary, loaded.separator) == (trained.vocabulary, trained.separator)
    assert loaded.encode(WORDS).tolist() == trained.encode(WORDS).tolist()
    assert ByteTokenizer().save(tmp_path) is None


def test_a_loaded_one_neither_truncates_nor_pads_nor_adds(documents: tuple[Document, ...], tmp_path: Path) -> None:
    path = tokenizer_for("bpe:300", documents, tmp_path).save(tmp_path)
    plain = tokenizer_for(str(path), (), tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.enable_truncation(8)
    inner.enable_padding(length=5000)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    inner.save(str(path))
    meddling = tokenizer_for(str(path), (), tmp_path)
    assert meddling.fingerprint != plain.fingerprint
    assert meddling.encode(WORDS).tolist() == plain.encode(WORDS).tolist()


def test_a_loaded_ones_own_separator_and_gaps_in_its_ids(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    vocabulary = {"<unk>": 0, "fox": 7, "</s>": 90}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(path))
    loaded = tokenizer_for(str(path), (), tmp_path)
    assert (loaded.separator, loaded.vocabulary) == (90, 91)
    described = json.loads(path.read_text())
    del described["model"]["vocab"]["</s>"]
    path.write_text(json.dumps(described))
    said = refusal(str(path), (), tmp_path)
    assert "no token to separate documents" in said
    assert "add_special_tokens" in said


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("bytes", "neither a tokenizer's name nor a file"),
        ("missing.json", "neither a tokenizer's name nor a file"),
        ("bpe:", "not a number"),
        ("bpe:many", "not a number"),
        ("bpe:-300", "not a number"),
        ("bpe:300.5", "not a number"),
        ("bpe:256", "256 bytes and the separator"),
        ("bpe:0", "256 bytes and the separator"),
    ],
)
def test_a_spec_that_names_none(documents: tuple[Document, ...], tmp_path: Path, spec: str, why: str) -> None:
    said = refusal(spec, documents, tmp_path)
    assert why in said
    assert "→" in said


@pytest.mark.parametrize("content", ["{}", "not json", "\udcff"])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert "tokenizer.json" in refusal(str(path), (), tmp_path)


def test_data_too_poor_for_the_size(documents: tuple[Document, ...], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"yield only \d+ tokens, not 5000") as caught:
        tokenizer_for("bpe:5000", documents, tmp_path)
    reached = str(caught.value).split('tokenizer = "')[1].split('"')[0]
    assert tokenizer_for(reached, documents, tmp_path).vocabulary < 5000


def test_junk_is_named_in_training_as_well(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(b"fine\nnot \xff fine")
    documents = corpus_of([str(tmp_path / "one"), str(tmp_path / "two")]).documents
    with pytest.raises(DataError, match=r"(?s)(one|two): not UTF-8.*(one|two): not UTF-8"):
        tokenizer_for("bpe:300", documents, tmp_path)


def test_without_the_extra(documents: tuple[Document, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # importing it now fails as if it were not installed
    assert 'pip install "thrice[hf]"' in refusal("bpe:300", documents, tmp_path)
    assert tokenizer_for("byte", documents, tmp_path).vocabulary == 256
