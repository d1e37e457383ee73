"""The folder of a run: what it refuses, and its lock."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from runs import exit_code, forked, run, tiny
from thrice.errors import UsageError
from thrice.run_folder import RunFolder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_processes_in_one_folder(corpus: Path, tmp_path: Path, one_thread: None, short_sample: None) -> None:
    job = tiny(corpus, tmp_path / "run", max_steps=1)
    run(job)
    ready, end = os.pipe()

    def hold() -> int:
        with RunFolder(tmp_path / "run", resume=True).held():
            os.write(end, b"x")
            signal.pause()
        return 0

    child = forked(hold, Path("/dev/null"))
    os.close(end)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    before = contents(tmp_path)
    try:
        with pytest.raises(UsageError, match=r"a process is training there(.|\n)*--resume goes on; another --run_dir"):
            run(tiny(corpus, tmp_path / "run", max_steps=2), resume=True)
        assert contents(tmp_path) == before
    finally:
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
    # the lock ended with the process that had it
    assert "2" in {line.split()[0] for line in run(tiny(corpus, tmp_path / "run", max_steps=2), resume=True)}


def test_a_run_that_came_and_went_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    late = RunFolder(tmp_path / "run", resume=False)
    early = RunFolder(tmp_path / "run", resume=False)
    with early.held():
        early.begin("lr = 1", 0)
        with pytest.raises(UsageError, match="a process is training there"), late.held():
            pass
    with pytest.raises(UsageError, match="is not empty, and nothing in it is overwritten"), late.held():
        pass
    assert (tmp_path / "run/job.toml").read_text() == "lr = 1"
    with RunFolder(tmp_path / "run", resume=True).held():
        pass


def test_a_filesystem_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with RunFolder(tmp_path / "run", resume=False).held():
        pass
