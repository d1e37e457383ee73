import os
import socket
from pathlib import Path

import pytest

from thrice.data.corpus import Corpus, corpus_of, pieces
from thrice.errors import DataError

PIECE = 1 << 20


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(path: str, content: str | bytes = "text\n") -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def names(corpus: Corpus) -> list[str]:
    return [document.name for document in corpus.documents]


def refusal(*data: str) -> str:
    with pytest.raises(DataError) as caught:
        for _ in pieces(corpus_of(data).documents):
            pass
    assert caught.value.exit_code == 5
    return str(caught.value)


def test_the_standard_library_without_its_tests() -> None:
    corpus = corpus_of(["stdlib"])
    found = set(names(corpus))
    assert {"argparse.py", "asyncio/events.py", "xml/dom/minidom.py"} <= found
    assert all(name.endswith(".py") for name in found)
    left_out = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert not [name for name in found if left_out & set(name.split("/"))]
    assert 8e6 < sum(document.size_bytes for document in corpus.documents) < 20e6
    assert sum(len(piece) for piece, _ in pieces(corpus.documents)) == sum(
        document.size_bytes for document in corpus.documents
    )


def test_a_folder_is_its_text_at_any_depth() -> None:
    for path in ("f/a.txt", "f/b", "f/deep/er/c.md", "f/.hidden", "f/.git/config"):
        write(path)
    write("f/empty.txt", "")
    write("f/image.png", b"\x89PNG\0\0")
    corpus = corpus_of(["f"])
    assert sorted(names(corpus)) == ["a.txt", "b", "deep/er/c.md"]
    assert corpus.not_text == (Path("f/image.png"),)


def test_a_folder_with_a_socket_in_it_does_not_hang() -> None:
    write("f/a.txt")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("f/socket")
        assert names(corpus_of(["f"])) == ["a.txt"]


def test_linked_folders_are_followed_and_a_loop_ends() -> None:
    write("elsewhere/a.txt")
    write("f/b.txt")
    Path("f/linked").symlink_to(Path("elsewhere").absolute())
    Path("f/loop").symlink_to(Path("f").absolute())
    assert sorted(names(corpus_of(["f"]))) == ["b.txt", "linked/a.txt"]


def test_patterns() -> None:
    for path in ("d/a.txt", "d/b.md", "d/e/c.txt", "d/.hidden.txt"):
        write(path)
    assert names(corpus_of(["d/*.txt"])) == ["a.txt"]
    assert sorted(names(corpus_of(["d/**/*.txt"]))) == ["a.txt", "e/c.txt"]
    assert sorted(names(corpus_of(["d/*"]))) == ["a.txt", "b.md"]
    assert sorted(names(corpus_of(["**/*.md"]))) == ["d/b.md"]
    assert sorted(names(corpus_of([str(Path("d").absolute() / "[ab].*")]))) == ["a.txt", "b.md"]


def test_a_file_whose_name_looks_like_a_pattern() -> None:
    write("d/a[1].txt")
    assert names(corpus_of(["d/a[1].txt"])) == ["a[1].txt"]


def test_one_file_matched_in_many_ways_is_one_document() -> None:
    file = write("d/a.txt")
    Path("d/link.txt").symlink_to(file.absolute())
    data = ["d/a.txt", "d", "d/*.txt", "./d/../d/a.txt", str(file.absolute())]
    assert names(corpus_of(data)) == ["a.txt"]


def test_equal_names_of_two_folders_are_two_documents_in_the_order_of_data() -> None:
    write("one/a.txt", "1")
    write("two/a.txt", "2")
    for data in (["one", "two"], ["two", "one"]):
        corpus = corpus_of(data)
        assert [document.path.parent.name for document in corpus.documents] == data


def test_the_order_is_that_of_names_hashed_wherever_the_folder_is() -> None:
    for name in map(str, range(50)):
        write(f"one/{name}")
        write(f"far/away/two/{name}")
    order = names(corpus_of(["one"]))
    assert order == names(corpus_of(["far/away/two"])) == names(corpus_of(["one/*"]))
    assert order != sorted(order)


def test_all_that_is_missing_is_named_at_once() -> None:
    Path("d").mkdir()
    said = refusal("nowhere.txt", "d/**/*.txt", "gone/*.txt", "stdlb")
    assert f"nowhere.txt: no such file or folder (looked for {Path('nowhere.txt').absolute()})" in said
    assert f"d/**/*.txt: matches no file in {Path('d').absolute()}" in said
    assert f"no folder {Path('gone').absolute()}" in said
    assert "stdlb: no such file" in said


def test_a_pattern_that_matches_folders_only() -> None:
    Path("d/e").mkdir(parents=True)
    assert "matches folders" in refusal("d/*")


def test_no_more_than_a_handful_is_named() -> None:
    said = refusal(*(f"missing-{i}" for i in range(12)))
    assert said.count("no such file") == 5
    assert "7 more" in said


@pytest.mark.parametrize("data", ["d/dangling", "d", "d/*"])
def test_an_unreadable_file_is_named(data: str) -> None:
    # A dangling link cannot be read by root either, as a file without permission could.
    write("d/fine.txt")
    Path("d/dangling").symlink_to("nothing")
    said = refusal(data)
    assert "d/dangling: cannot be read: No such file" in said
    assert "→" in said


def test_a_file_without_permission_is_named() -> None:
    write("d/secret.txt").chmod(0)
    Path().chmod(0o755)
    user = os.geteuid()
    if user == 0:  # root reads it all the same, unless it gives that right up for a moment
        os.seteuid(65534)
    try:
        assert "secret.txt: cannot be read: Permission denied" in refusal("d/secret.txt")
    finally:
        os.seteuid(user)


def test_what_is_not_a_file_is_refused_where_it_was_named() -> None:
    os.mkfifo("pipe")
    assert "not a regular file" in refusal("pipe")


@pytest.mark.parametrize("content", [None, b""])
def test_an_empty_corpus_is_refused(content: bytes | None) -> None:
    Path("d").mkdir()
    if content is not None:
        write("d/a.txt", content)
    said = refusal("d")
    assert "0 bytes" in said
    assert "['d']" in said


def test_binary_junk_is_named_with_its_byte_and_all_of_it_at_once() -> None:
    write("d/fine.txt")
    write("d/nul.txt", b"x" * (PIECE + 10) + b"\0yz")
    write("d/latin.txt", "caf\u00e9".encode("latin-1"))
    write("d/cut.txt", "caf\u00e9".encode()[:-1])
    said = refusal("d")
    assert f"nul.txt: not text: byte {PIECE + 10:,} is NUL" in said
    assert "latin.txt: not UTF-8 text: byte 3 is 0xe9" in said
    assert "cut.txt: not UTF-8 text: byte 3 is 0xc3" in said
    assert "iconv" in said


def test_no_more_than_a_handful_of_junk_is_named() -> None:
    for i in range(9):
        write(f"d/{i}", b"\xff")
    assert refusal("d").count("not UTF-8") == 5


def test_a_binary_file_that_was_named_is_refused_and_not_passed_over() -> None:
    write("image.png", b"\x89PNG\0")
    assert "image.png" in refusal("image.png")


def test_a_file_that_changes_after_it_was_found_is_refused() -> None:
    documents = corpus_of([str(write("a.txt", "before"))]).documents
    write("a.txt", "afterwards")
    with pytest.raises(DataError, match="changed since it was found"):
        list(pieces(documents))


@pytest.mark.parametrize(
    "content",
    [
        b"short, no newline",
        b"x" * PIECE,
        b"line\n" * (PIECE // 2),
        "\u20ac".encode() * PIECE,  # no newline, and characters across every border
        b"first\n" + b"x" * (3 * PIECE),
    ],
    ids=["short", "exact", "lines", "wide", "late"],
)
def test_pieces_are_the_bytes_bounded_and_never_cut_in_a_character(content: bytes) -> None:
    documents = corpus_of([str(write("a.txt", content))]).documents
    parts = list(pieces(documents))
    assert b"".join(piece for piece, _ in parts) == content
    assert [ends for _, ends in parts] == [False] * (len(parts) - 1) + [True]
    assert max(len(piece) for piece, _ in parts) <= 2 * PIECE
    for piece, ends in parts:
        piece.decode()
        assert ends or piece.endswith(b"\n") or b"\n" not in piece
