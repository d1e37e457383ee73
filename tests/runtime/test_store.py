"""Checkpoints: what comes back, and what is left when the process, the disk or a file fails."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from thrice import files
from thrice.errors import CheckpointError, DataError
from thrice.runtime import store

FILES = ("weights.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "manifest.json")


def content(value: int) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, object]]:
    """Three groups and a state that all say `value`."""
    tensors = {
        "weights": {"w": torch.full((64,), float(value)), "b": torch.tensor(value, dtype=torch.bfloat16)},
        "optimizer": {"w.step": torch.tensor(value)},
        "rng": {"cpu": torch.full((16,), value % 256, dtype=torch.uint8)},
    }
    return tensors, {"step": value}


def save(folder: Path, step: int, *, keep_last: int = 2, value: int | None = None) -> Path:
    return store.save(folder, step, *content(step if value is None else value), keep_last=keep_last)


def holds(path: Path, value: int) -> bool:
    tensors, state = store.load(path)
    return state == {"step": value} and bool((tensors["weights"]["w"] == value).all())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    return plain.copy_(tensor.detach()).reshape(-1).view(torch.uint8)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def forked(act: Callable[[], None]) -> int:
    """The process id of a child that runs `act`; it exits with 0, or with 99 if that raised."""
    with warnings.catch_warnings():
        # Later Pythons warn of forking beside threads; the child uses none.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            act()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(99)
    return pid


def ended(pid: int) -> int:
    """The exit code of a child, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(act: Callable[[], None]) -> int:
    return ended(forked(act))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


# ---- what comes back


def test_every_kind_of_tensor_comes_back_bit_for_bit(folder: Path) -> None:
    torch.manual_seed(0)
    wide = torch.randn(6, 10)
    dtypes = (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    )  # fmt: skip
    tensors = {str(dtype): (torch.rand(3, 5) * 9).to(dtype) for dtype in dtypes}
    tensors |= {
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "0-dim": torch.tensor(7),
        "0-dim bf16": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.int32),
        "transposed": wide.T,
        "strided": wide[::2, 1::3],
        "expanded": torch.tensor([3.0]).expand(4, 4),
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "negated": torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(wide.clone()),
        "größe/🙂\n": torch.arange(3),
    }
    loaded, state = store.load(store.save(folder, 1, {"weights": tensors, "none": {}}, {}, keep_last=1))
    assert state == {}
    assert loaded["none"] == {}
    assert loaded["weights"].keys() == tensors.keys()
    for name, saved in tensors.items():
        back = loaded["weights"][name]
        assert (back.dtype, back.shape) == (saved.dtype, saved.shape), name
        assert torch.equal(bits(back), bits(saved)), name


def test_the_safetensors_library_reads_the_files(folder: Path) -> None:
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(5).bfloat16(),
        "wide": torch.randn(2, 3, dtype=torch.float64),
        "step": torch.tensor(4),
    }
    path = store.save(folder, 1, {"weights": tensors}, {}, keep_last=1)
    theirs = load_file(path / "weights.safetensors")
    assert theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=0)


def test_names_of_one_storage_come_back_with_their_own_values(folder: Path) -> None:
    flat = torch.arange(8.0)
    tensors = {"embedding": flat, "head": flat, "left": flat[:5], "right": flat[3:]}
    loaded, _ = store.load(store.save(folder, 1, {"weights": tensors}, {}, keep_last=1))
    for name, tensor in tensors.items():
        assert torch.equal(loaded["weights"][name], tensor)
    loaded["weights"]["embedding"].zero_()
    assert torch.equal(loaded["weights"]["head"], flat)


def test_state_comes_back_exactly(folder: Path) -> None:
    state = {"lr": 0.1 + 0.2, "seed": 2**63 - 1, "text": "größe", "list": [1, None], "nested": {"a": 1e-300}}
    assert store.load(store.save(folder, 1, {}, state, keep_last=1))[1] == state


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex128)],
    ids=["meta", "sparse", "complex128"],
)
def test_a_tensor_that_cannot_be_saved_is_named_and_not_written(folder: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"weights: the.culprit is a .* cannot hold"):
        store.save(folder, 1, {"weights": {"fine": torch.ones(2), "the.culprit": tensor}}, {}, keep_last=1)
    assert not folder.exists()


def test_extra_memory_is_one_tensor(folder: Path) -> None:
    strided = torch.ones(2**11, 5 * 2**10).T  # 40 MiB: above what the allocator ever takes from its heap
    tensors = dict.fromkeys("abc", strided)

    def status_bytes(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

    def measured() -> None:
        before = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        store.save(folder, 2, {"weights": tensors}, {}, keep_last=1)
        # About 8 MiB are code that was not yet in memory; half a tensor tells one copy from two.
        assert 1.0 <= (status_bytes("VmHWM") - before) / strided.nbytes <= 1.5

    assert in_child(measured) == 0


# ---- the folder


def test_layout_and_pointer(folder: Path) -> None:
    path = save(folder, 1000)
    assert path == folder / "step-00001000"
    assert names(path) == sorted(FILES)
    assert names(folder) == ["step-00001000"]
    assert (folder.parent / "latest").read_text() == "checkpoints/step-00001000\n"
    assert names(folder.parent) == ["checkpoints", "latest"]


def test_keep_last_removes_the_oldest_of_ours_only(folder: Path) -> None:
    for step in (10, 20, 30):
        save(folder, step, keep_last=3)
    (folder / "step-00000020" / "notes.txt").write_text("mine")
    (folder / "step-00000005").mkdir()
    (folder / "step-00000005" / "thesis.tex").write_text("mine")
    (folder / "best").mkdir()
    (folder / "step-00000006").symlink_to(folder / "step-00000030")
    save(folder, 40, keep_last=1)
    assert names(folder) == ["best", "step-00000005", "step-00000006", "step-00000020", "step-00000040"]


def test_going_back_never_removes_what_was_just_written(folder: Path) -> None:
    for step in (10, 20, 30):
        save(folder, step, keep_last=3)
    save(folder, 15, keep_last=1)
    assert names(folder) == ["step-00000015", "step-00000020", "step-00000030"]


def test_the_same_step_is_replaced(folder: Path) -> None:
    save(folder, 7, value=1)
    path = save(folder, 7, value=2)
    assert holds(path, 2)
    assert names(folder) == ["step-00000007"]


def test_a_damaged_checkpoint_in_the_way_is_kept_aside(folder: Path) -> None:
    path = save(folder, 7, value=1)
    (path / "notes.txt").write_text("mine")
    assert holds(save(folder, 7, value=2), 2)
    aside = [folder / name for name in names(folder) if ".damaged-" in name]
    assert [(p / "notes.txt").read_text() for p in aside] == ["mine"]
    assert store.latest(folder) == (path, [])


def test_latest_skips_the_damaged_and_says_why(folder: Path) -> None:
    for step in (1, 2, 3, 4):
        save(folder, step, keep_last=9)
    (folder / "step-00000004" / "state.json").unlink()
    (folder / "step-00000003" / "optimizer.safetensors").write_bytes(b"")
    (folder / ".step-00000009.tmp-1-abcd").mkdir()
    found, rejected = store.latest(folder)
    assert found == folder / "step-00000002"
    assert len(rejected) == 2
    assert "step-00000004: state.json is missing" in rejected[0]
    assert "step-00000003: optimizer.safetensors has 0 bytes" in rejected[1]
    assert not any("\n" in line for line in rejected)


def test_latest_of_nothing(folder: Path) -> None:
    assert store.latest(folder) == (None, [])
    folder.mkdir(parents=True)
    assert store.latest(folder) == (None, [])
    (folder / "file").write_text("")
    with pytest.raises(CheckpointError, match="file cannot be read: Not a directory"):
        store.latest(folder / "file")


# ---- damage


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found_and_named(folder: Path, name: str) -> None:
    file = save(folder, 1) / name
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=rf"step-00000001: {name} "):
            store.load(file.parent)
    file.write_bytes(whole)
    assert holds(file.parent, 1)


@pytest.mark.parametrize("name", FILES)
def test_truncated_longer_missing_or_unreadable_files_are_named(folder: Path, name: str) -> None:
    file = save(folder, 1) / name
    whole = file.read_bytes()
    for damaged in (b"", whole[:4], whole[: len(whole) // 2], whole[:-1], whole + b"\0", bytes(len(whole))):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"step-00000001: {name} "):
            store.load(file.parent)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"step-00000001: {name} is missing"):
        store.load(file.parent)
    file.mkdir()
    with pytest.raises(CheckpointError, match=rf"step-00000001: {name} (has|cannot be read)"):
        store.load(file.parent)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["TRAP"],)


def test_a_pickle_is_named_and_never_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = tmp_path / "sprung"
    monkeypatch.setenv("TRAP", str(trap))
    path = save(folder, 1)
    torch.save({"w": Trap()}, path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"weights.pt \(a pickle.*\) is not one of its files"):
        store.load(path)
    for name in FILES:
        shutil.rmtree(folder)
        save(folder, 1)
        (path / name).write_bytes(pickle.dumps(Trap()))
        with pytest.raises(CheckpointError, match=rf"{name} \(a pickle, which thrice never loads\)"):
            store.load(path)
    lone = tmp_path / "model.pt"
    torch.save({"w": Trap()}, lone)
    with pytest.raises(CheckpointError, match=r"model.pt \(a pickle.*\) cannot be read: Not a directory"):
        store.load(lone)
    assert not trap.exists()


def test_an_unknown_version_another_program_and_a_renamed_folder(folder: Path, tmp_path: Path) -> None:
    path = save(folder, 1)
    manifest = path / "manifest.json"
    whole = manifest.read_text()
    cases = {
        whole.replace('"version": 1', '"version": 2'): "format version 2, this thrice reads 1",
        "epoch 3": "manifest.json is not JSON",
        "[]": "not a checkpoint of thrice",
        '{"format": "other"}': "not a checkpoint of thrice",
        '{"format": "thrice-checkpoint", "version": 1}': "not as it was written",
        whole.replace('"step": 1', '"step": 2'): "not as it was written",
        whole.replace("  ", " "): "not as it was written",
    }
    for text, why in cases.items():
        manifest.write_text(text)
        with pytest.raises(CheckpointError, match=why):
            store.load(path)
    manifest.write_text(whole)
    path.rename(folder / "step-00000005")
    with pytest.raises(CheckpointError, match="is of step 1 → rename the folder to step-00000001"):
        store.load(folder / "step-00000005")
    (folder / "step-00000005").rename(folder / "best")
    assert holds(folder / "best", 1)
    (tmp_path / "theirs").mkdir()
    with pytest.raises(CheckpointError, match=r"theirs: manifest.json is missing"):
        store.load(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="nowhere cannot be read: No such file"):
        store.load(tmp_path / "nowhere")


# ---- the writer is killed


def killed_at(call: int, act: Callable[[], None]) -> int:
    """Run `act` in a child that kills itself in place of its `call`-th change to the disk; its end."""

    def doomed() -> None:
        left = call

        def counted(change: Callable[..., object]) -> Callable[..., object]:
            def changed(*args: object, **kwargs: object) -> object:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return change(*args, **kwargs)

            return changed

        for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        act()

    return in_child(doomed)


@pytest.mark.parametrize("step", [2, 1], ids=["next step", "same step"])
def test_killed_before_each_change_to_the_disk(folder: Path, step: int) -> None:
    ends = []
    for call in range(100):
        shutil.rmtree(folder.parent, ignore_errors=True)
        save(folder, 1, value=1)
        ends.append(killed_at(call, lambda: save(folder, step, keep_last=1, value=2)))
        found, rejected = store.latest(folder)
        assert found is not None, call
        assert rejected == []
        assert holds(found, 2) or (ends[-1] != 0 and holds(found, 1))
        pointed = folder.parent / (folder.parent / "latest").read_text().strip()
        assert ends[-1] != 0 or holds(pointed, 2)
        # The next save removes what was left, and what was kept counts as any other.
        save(folder, 3, keep_last=2)
        assert names(folder) == [found.name.removeprefix(".").removesuffix(".old"), "step-00000003"]
        assert names(folder.parent) == ["checkpoints", "latest"]
        if ends[-1] == 0:
            break
    # It did go through every change: files, folders, renames, the pointer, the removal of the old one.
    assert ends[-1] == 0
    assert set(ends[:-1]) == {-signal.SIGKILL}
    assert len(ends) > 15


def test_killed_at_random_moments(folder: Path) -> None:
    save(folder, 1)
    reached = 1
    moments = random.Random(0)
    for _ in range(12):
        reader, writer = os.pipe()

        def saving(first: int = reached, writer: int = writer) -> None:
            for step in range(first, first + 10_000):
                save(folder, step, keep_last=1)
                save(folder, step, keep_last=1)
                os.write(writer, step.to_bytes(4, "little"))

        pid = forked(saving)
        os.close(writer)
        time.sleep(moments.uniform(0.02, 0.15))
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
        with os.fdopen(reader, "rb") as pipe:
            reached = int.from_bytes(pipe.read()[-4:], "little") or reached
        found, rejected = store.latest(folder)
        assert found is not None
        assert rejected == []
        assert holds(found, reached) or holds(found, reached + 1)
    save(folder, reached + 5, keep_last=1)
    assert names(folder) == [f"step-{reached + 5:08d}"]


def test_a_live_writers_temporary_stays(folder: Path) -> None:
    save(folder, 1)
    held = folder / ".step-00000002.tmp-1-aa"
    held.mkdir()
    reader, writer = os.pipe()

    def holding() -> None:
        with files.claimed(held) as is_ours:
            os.write(writer, bytes([is_ours]))
            time.sleep(60)

    pid = forked(holding)
    assert os.read(reader, 1) == b"\1"
    save(folder, 3)
    assert held.exists()
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL
    save(folder, 4)
    assert not held.exists()
    os.close(reader)
    os.close(writer)


# ---- the disk refuses


def refused(folder: Path, match: str) -> str:
    """Save a megabyte, which fails; what is there stays as it was."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(DataError, match=match) as caught:
        store.save(folder, 2, {"weights": {"w": torch.ones(2**18)}}, {}, keep_last=1)
    assert not isinstance(caught.value, CheckpointError)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_no_space_is_said_before_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000))
    message = refused(folder, "step 2 cannot be written .* No space left")
    assert "needs 1,048," in message
    assert "5,000 bytes are free" in message
    assert "lower checkpoint.keep_last" in message
    assert names(folder) == ["step-00000001"]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", str(mount)], capture_output=True
        ).returncode
    ):
        pytest.skip("mounting is not permitted here; the file-size limit below fails in the middle too")
    try:
        folder = mount / "run" / "checkpoints"
        path = save(folder, 1)
        refused(folder, "No space left")
        # Something else takes the space after it was looked at: the disk fills in the middle of a tensor.
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**9))
        refused(folder, "No space left")
        assert names(folder) == ["step-00000001"]
        assert store.latest(folder) == (path, [])
        with pytest.raises(DataError, match=r"metrics.jsonl cannot be written .* No space left"):
            files.write_whole(folder.parent / "metrics.jsonl", bytes(2**20))
        assert names(folder.parent) == ["checkpoints", "latest"]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_limit_on_the_size_of_a_file(folder: Path) -> None:
    path = save(folder, 1)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, 2**19))
        message = refused(folder, "File too large")
        assert "ulimit -f" in message
        assert names(folder) == ["step-00000001"]

    assert in_child(limited) == 0
    assert store.latest(folder) == (path, [])


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failing_sync_at_any_file_leaves_what_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    # A delayed allocation or a network disk reports here, after every write went well.
    save(folder, 1)
    sync = os.fsync
    for failing in range(4):  # one tensor file, the state, the manifest, the folder
        calls = iter(range(100))

        def broken(descriptor: int, failing: int = failing, calls: object = calls) -> None:
            if next(calls) == failing:  # type: ignore[call-overload]
                raise OSError(code, os.strerror(code))
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", broken)
        refused(folder, os.strerror(code))
        assert names(folder) == ["step-00000001"]


def test_a_read_only_folder() -> None:
    # A superuser may write anywhere, so the child becomes somebody else, who may not pass through tmp_path.
    open_to_all = Path(tempfile.mkdtemp())
    folder = open_to_all / "checkpoints"
    try:
        path = save(folder, 1)
        for parent in (folder, open_to_all):
            parent.chmod(0o555)

        def as_nobody() -> None:
            if os.geteuid() == 0:
                os.seteuid(65534)
            message = refused(folder, "Permission denied")
            assert "make the folder writable" in message
            refused(open_to_all / "elsewhere", "Permission denied")
            with pytest.raises(DataError, match=r"job.toml cannot be written .* Permission denied"):
                files.write_whole(open_to_all / "job.toml", "x")
            assert store.latest(folder) == (path, [])

        assert in_child(as_nobody) == 0
        (path / "state.json").chmod(0)

        def unreadable() -> None:
            if os.geteuid() == 0:
                os.seteuid(65534)
            with pytest.raises(CheckpointError, match=r"state.json cannot be read: Permission denied"):
                store.load(path)

        assert in_child(unreadable) == 0
    finally:
        for parent in (open_to_all, folder):
            parent.chmod(0o755)
        shutil.rmtree(open_to_all)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    refused(tmp_path / "run", "File exists")
    refused(tmp_path / "run" / "checkpoints", "Not a directory")
    assert (tmp_path / "run").read_text() == "mine"


def test_an_interrupted_save_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(folder, 1)

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(folder, 2)
    assert names(folder) == ["step-00000001"]
    assert store.latest(folder) == (path, [])


# ---- small files


def test_write_whole_is_old_or_new_when_killed(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for call in range(20):
        files.write_whole(path, "old")
        end = killed_at(call, lambda: files.write_whole(path, b"new"))
        assert path.read_text() == "new" if end == 0 else path.read_text() in ("old", "new")
        if end == 0:
            break
    assert end == 0
    assert call >= 2
    assert names(tmp_path) == ["record.json"]


def test_truncate_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert files.truncate_metrics(path, 5) == 0
    assert not path.exists()
    rows = [json.dumps({"step": step, "loss": 1.0 / step}) for step in (1, 2, 2, 3)]
    torn = [b'{"step": 2, "lo', b"\0\0\0", b"\xff\xfe", b"", b"17", b"null"]
    path.write_bytes(rows[0].encode() + b"\n" + b"\n".join(torn) + b"\n" + "\n".join(rows[1:]).encode())
    assert files.truncate_metrics(path, 3) == 3
    assert path.read_text() == "".join(row + "\n" for row in rows[:3])
    assert files.truncate_metrics(path, 7) == 3
    assert files.truncate_metrics(path, 0) == 0
    assert path.read_bytes() == b""
    with pytest.raises(DataError, match="cannot be read"):
        files.truncate_metrics(tmp_path, 1)
