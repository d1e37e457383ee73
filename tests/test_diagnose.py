"""Out of memory for real: the explanation, and fixes that fit where the job did not."""

from __future__ import annotations

import errno
import os
import re
import resource
import shlex
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runs import exit_code, forked, tiny
from thrice.cli import main
from thrice.diagnose import _alternatives, explained, is_out_of_memory, ranked_fixes
from thrice.errors import OutOfMemory
from thrice.job_file import load_job
from thrice.observe.rehearse import rehearse
from thrice.runtime import memory
from thrice.spec.dump import dump
from thrice.spec.job import Decoder, Evaluation, Job, Optimizer
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import Recompute

pytestmark = pytest.mark.usefixtures("one_thread", "short_sample")

HEADROOM_BYTES = 250 << 20
"""What the children may take beside what is mapped already: less than a step of `big`, and enough for a fix of it
with the addresses, 64 MiB at a time, that the allocator sets aside for each thread."""


def big(corpus: Path, run_dir: Path) -> Job:
    """A step of some 400 MiB, most of it activations."""
    return tiny(
        corpus,
        run_dir,
        sequence=256,
        global_batch=32,
        micro_batch=32,
        max_steps=1,
        decoder=Decoder(layers=2, hidden=256, heads=4),
        evaluation=Evaluation(fraction=0.0),
    )


def limited(arguments: list[str], output: Path) -> int:
    """The exit code of a child whose addresses are limited."""

    def act() -> int:
        status = Path("/proc/self/status").read_text()
        mapped = int(re.search(r"VmSize:\s*(\d+) kB", status)[1]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (mapped + HEADROOM_BYTES,) * 2)
        return main(arguments)

    return exit_code(forked(act, output))


def bytes_of(shown: str) -> float:
    number, unit = shown.split()
    return float(number) * {"MiB": 1 << 20, "GiB": 1 << 30}[unit]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no limit on addresses here")
def test_out_of_memory_is_explained_and_the_first_fix_runs(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(dump(big(corpus, tmp_path / "run")))
    output = tmp_path / "output"
    # what a rehearsal and recomputation import, the children need not
    rehearse(tiny(corpus, tmp_path / "run", techniques=(Recompute(strategy="full"),)), 256)
    assert limited(["train", str(file)], output) == 6, output.read_text()
    said = output.read_text()
    assert "Traceback" not in said
    assert re.search(r"thrice: out of memory: [\d.]+ [KM]iB more could not be had\n", said)
    whole = re.search(r"  used      ([\d.]+ [MG]iB) at the most, of ([\d.]+ [MG]iB), by the whole process", said)
    used, limit = (bytes_of(shown) for shown in whole.groups())
    assert limit - HEADROOM_BYTES < used <= limit
    planned = re.search(r"  planned   ([\d.]+) MiB of tensors for one step: (.*)", said)
    assert float(planned[1]) * 2**20 > HEADROOM_BYTES
    assert {"parameters", "optimizer_states", "activations"} <= set(
        re.findall(r"[a-z_]+(?= [\d.]+ [KM]iB)", planned[2])
    )
    fixes = re.findall(r"^ +([\d.]+) MiB  (--.*)$", said, re.MULTILINE)
    assert len(fixes) == 3
    assert [float(needed) for needed, _ in fixes] == sorted(float(needed) for needed, _ in fixes)
    assert float(fixes[0][0]) < float(planned[1])
    fixed = tmp_path / "fixed"
    assert limited(["train", str(file), "--resume", *shlex.split(fixes[0][1])], fixed) == 0, fixed.read_text()
    assert "done       1 steps" in fixed.read_text()


@pytest.mark.parametrize("command", ["train", "verify"])
def test_both_commands_explain(
    command: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(f"thrice.{command}.{command}", out)
    monkeypatch.setattr("thrice.diagnose.ranked_fixes", lambda *_, **__: [("--recompute full", 1 << 20)])
    file = tmp_path / "job.toml"
    file.write_text(dump(tiny(corpus, tmp_path / "run", decoder=Decoder(layers=1, hidden=32, heads=1))))
    assert main([command, str(file)]) == 6
    said = capsys.readouterr().err
    assert said.startswith("thrice: out of memory: MemoryError\n  used ")
    assert re.search(r"\n  planned   [\d.]+ MiB of tensors for one step: parameters ", said)
    assert said.endswith("add one of these:\n         1 MiB  --recompute full\n")


def test_the_failed_step_is_gone_before_the_rehearsal(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the step held, its frames hold; a rehearsal beside them would have no room."""
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def step() -> None:
        activations = torch.ones(10)
        held.append(weakref.ref(activations))
        raise MemoryError

    def looking(job: Job, vocabulary: int):
        alive.append(held[0]() is not None)
        return rehearse(job, vocabulary)

    monkeypatch.setattr("thrice.diagnose.rehearse", looking)
    monkeypatch.setattr("thrice.diagnose._alternatives", lambda job: [("--recompute none", job)])
    with pytest.raises(OutOfMemory) as caught:
        explained(tiny(corpus, tmp_path / "run"), step)
    assert alive == [False, False]
    assert caught.value.exit_code == 6
    assert caught.value.__context__ is None


def test_only_running_out_of_memory_is_explained(corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "run")
    for error in (RuntimeError("shapes differ"), OSError(errno.ENOENT, "no such file"), KeyError("x")):

        def act(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            explained(job, act)
        assert caught.value is error
    assert explained(job, lambda: 7) == 7


def test_what_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


AWKWARD = {
    "global batch alone": {"micro_batch": None},
    "micro-batch alone": {"global_batch": None, "micro_batch": 48},
    "all three": {"micro_batch": 24, "grad_accum_steps": 2},
    "fp16 with its scale": {"techniques": (Precision(mode="fp16", initial_scale=64.0, growth_interval=5),)},
    "bf16-pure, compensated": {"techniques": (Precision(mode="bf16-pure", rounding="compensated"),)},
    "every third block": {"techniques": (Recompute(strategy="every_k", k=3),)},
    "within a budget": {"techniques": (Recompute(strategy="budget", budget_bytes=1 << 20),)},
}


@pytest.mark.parametrize("case", AWKWARD)
def test_flags_say_what_was_rehearsed(case: str, corpus: Path, tmp_path: Path) -> None:
    """Whatever the job's own file says beside them: another batch or a leftover setting would be another job."""
    job = tiny(corpus, tmp_path / "run", **AWKWARD[case])
    file = tmp_path / "job.toml"
    file.write_text(dump(job))
    alternatives = list(_alternatives(job))
    assert len(alternatives) >= 4
    for flags, other in alternatives:
        words = shlex.split(flags)
        assert all(word.startswith("--") for word in words[::2])
        loaded = load_job(file, [(word.removeprefix("--"), value) for word, value in pairwise_apart(words)])
        assert loaded.ledger() == other.ledger()
        assert loaded.ledger().global_batch == job.ledger().global_batch
        assert set(loaded.techniques) == set(other.techniques)
        spelt = {"micro_batch": None, "grad_accum_steps": None, "global_batch": None, "techniques": ()}
        assert replace(loaded, **spelt) == replace(other, **spelt) == replace(job, **spelt)


def pairwise_apart(words: list[str]) -> list[tuple[str, str]]:
    return list(zip(words[::2], words[1::2], strict=True))


def test_ranked_fixes(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest first; each needs what a rehearsal of the job it makes says; none is refused for this job."""
    job = tiny(
        corpus,
        tmp_path / "run",
        decoder=Decoder(layers=1, hidden=32, heads=1),
        optimizer=Optimizer(implementation="foreach"),
    )
    now = rehearse(job, 256).peak_bytes
    fixes = ranked_fixes(job, 256, now)
    needed = [bytes_ for _, bytes_ in fixes]
    assert needed == sorted(needed)
    assert needed[-1] < now
    assert fixes[0][0] == "--micro_batch 1 --recompute full"
    others = dict(_alternatives(job))
    assert rehearse(others["--recompute full"], 256).peak_bytes == dict(fixes)["--recompute full"]
    assert [flags for flags, _ in fixes if "--precision bf16" in flags] == ["--precision bf16"]
    assert any("bf16-pure" in flags for flags in others), "refused: its updates are rounded one by one"
    monkeypatch.setattr("thrice.diagnose.rehearse", lambda job, vocabulary: SimpleNamespace(peak_bytes=1))
    resumed = {flags for flags, _ in ranked_fixes(job, 256, now, resuming=True)}
    assert resumed == {flags for flags in others if "precision" not in flags}


def test_bytes_as_people_read_them() -> None:
    assert [memory.shown(count) for count in (0, 1023, 1024, 1536 << 10, 38 << 30, 3 << 40)] == [
        "0 B", "1023 B", "1 KiB", "1.5 MiB", "38 GiB", "3 TiB",
    ]  # fmt: skip
