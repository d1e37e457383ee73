import errno
import os
import resource
from pathlib import Path

import pytest

from thrice.errors import DataError
from thrice.files import claimed, written_whole


def test_a_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with written_whole(path, "fix") as file:
        file.write(b"half")
        assert not path.exists()
        file.write(b" and half")
    assert path.read_bytes() == b"half and half"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, DataError])
def test_what_was_there_stays_when_writing_fails(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail() -> None:
        with written_whole(path, "fix") as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")  # this stops root too
    with (
        pytest.raises(DataError, match=r"cannot be written to .*\n    → set it elsewhere"),
        written_whole(tmp_path / "file" / "x", "set it elsewhere"),
    ):
        pass


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    def fill() -> None:
        with written_whole(tmp_path / "x", "free space") as file:
            for _ in range(10):
                file.write(bytes(50_000))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the system itself then refuses to write on
    try:
        with pytest.raises(DataError, match=os.strerror(errno.EFBIG)) as caught:
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path) in str(caught.value)
    assert "→ free space" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x"
    left, live, foreign = tmp_path / ".x.tmp-1-dead", tmp_path / ".x.tmp-2-live", tmp_path / ".x"
    for file in (left, live, foreign):
        file.touch()
    with claimed(live) as is_ours, written_whole(path, "fix"):
        assert is_ours
    assert sorted(tmp_path.iterdir()) == [foreign, live, path]
