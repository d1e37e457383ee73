"""A whole comparison, its runs in child processes as users have them: interrupted, resumed, with variants that fail."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from runs import metrics, saved_steps, tiny
from thrice.child import train_in_child
from thrice.cli import main
from thrice.compare import run, summed_up
from thrice.errors import Interrupted, UsageError
from thrice.experiment import Experiment, expand
from thrice.spec.dump import dump
from thrice.spec.job import Checkpoint, Decoder, Evaluation

VARY = ["--vary", "lr=3e-3,1e30"]
"""The second rate is the planted fault: after the first update the loss is not finite."""


@dataclass
class Done:
    file: Path
    out: Path
    interrupted: Interrupted
    said_before: list[str]
    code: int
    stdout: str
    stderr: str

    def experiment(self) -> Experiment:
        return expand(self.file, vary=VARY[1::2])


@pytest.fixture(scope="module")
def done(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    """Interrupted in its first run by SIGINT, then `--resume` from the command line to the end."""
    folder = tmp_path_factory.mktemp("compare")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("THRICE_CACHE", str(folder / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        job = tiny(
            corpus,
            Path("runs/tiny"),
            max_steps=12,
            global_batch=8,
            micro_batch=8,
            decoder=Decoder(layers=1, hidden=32, heads=1),
            checkpoint=Checkpoint(keep_last=1),
            evaluation=Evaluation(max_samples=2),
        )
        file = folder / "tiny.toml"
        file.write_text(dump(job).replace("lr = 0.003\n", ""))
        lines: list[str] = []

        def say(line: str) -> None:
            lines.append(line)
            signal.raise_signal(signal.SIGINT)

        with pytest.raises(Interrupted) as caught:
            run(expand(file, vary=VARY[1::2]), say=say)
        stdout, stderr = io.StringIO(), io.StringIO()
        with redirect_stdout(stdout), redirect_stderr(stderr):
            code = main(["compare", "tiny.toml", *VARY, "--resume"])
        yield Done(file, Path("runs/compare-tiny"), caught.value, lines, code, stdout.getvalue(), stderr.getvalue())


def test_interrupted_keeps_what_is_done(done: Done) -> None:
    assert done.interrupted.exit_code == 130
    assert "0 of 2 runs are done and kept in runs/compare-tiny\n  --resume goes on" in str(done.interrupted)
    assert len(done.said_before) == 1
    assert done.said_before[0].startswith("[1/2] lr=3e-3 · seed 5 │      1   ")
    # the child was told, saved, and the resumed run is the whole one
    assert saved_steps(done.out / "lr=3e-3-seed5") == [12]
    steps = [row["step"] for row in metrics(done.out / "lr=3e-3-seed5") if "loss" in row]
    assert steps == list(range(1, 13))


def test_a_variant_that_fails_stops_no_other(done: Done) -> None:
    assert done.code == 1
    assert "thrice: 1 of 2 runs failed; the others are kept and compared" in done.stderr
    assert "[1/2] lr=3e-3 · seed 5 · done" in done.stdout
    assert "[2/2] lr=1e30 · seed 5 · FAILED, exit code 1: the " in done.stdout


def test_the_terminal_shows_table_and_verdicts(done: Done) -> None:
    table = done.stdout[done.stdout.index("tiny: 2 variants") :]
    for text in ("training loss", "validation loss", "tokens/s", "peak bytes", "skipped"):
        assert text in table
    assert "lr=1e30: FAILED\n  1 of 1 runs failed: exit code 1: the " in table
    assert " is not finite" in table


def test_json_has_everything(done: Done) -> None:
    written = json.loads((done.out / "compare.json").read_text())
    assert written["baseline"] == "lr=3e-3"
    assert written["compared_over"] == "steps"
    assert {"cpu", "cores", "torch", "date"} <= written["machine"].keys()
    by_name = {variant["variant"]: variant for variant in written["variants"]}
    assert len(by_name) == 2
    fine, broken = by_name["lr=3e-3"], by_name["lr=1e30"]
    assert fine["verdict"] is None, "the baseline has none"
    assert fine["runs"][0]["steps"] == 12
    assert fine["peak_bytes"]["mean"] > 100 * 2**20, "torch alone is more"
    # the figures are those of the run itself
    (own,) = fine["runs"]
    record = json.loads(Path(own["run_dir"], "record.json").read_text())["measured"]
    assert own["peak_bytes"] == record["peak_bytes"]
    assert own["validation_loss"] == record["validation_loss"]
    last = [row for row in metrics(Path(own["run_dir"])) if "taken" in row][-1]
    assert own["final_loss"] == last["loss"], "5% of 12 steps is the last one"
    assert (broken["verdict"]["judgement"], broken["final_loss"], broken["runs"][0]["exit_code"]) == ("failed", None, 1)
    assert broken["runs"][0]["steps"] < 12


def test_every_variant_begins_alike(done: Done) -> None:
    """The same weights and the same samples: the loss of the first step, before any update, is the same number."""
    first = {metrics(folder)[0]["loss"] for folder in done.out.glob("*-seed5/")}
    assert len(list(done.out.glob("*-seed5/"))) == 2
    assert len(first) == 1


def test_the_page_is_there(done: Done) -> None:
    assert "runs/compare-tiny/report.html has the curves" in done.stdout
    page = (done.out / "report.html").read_text()
    assert "lr=3e-3" in page
    assert "is not finite" in page


def test_nothing_is_overwritten(done: Done) -> None:
    before = {path: path.read_bytes() for path in done.out.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="is not empty, and nothing in it is overwritten\n  --resume reuses"):
        run(done.experiment())
    experiment = done.experiment()
    longer = [replace(each, job=replace(each.job, max_steps=13)) for each in experiment.variants]
    with pytest.raises(UsageError, match=r"was begun with another job \(other: max_steps\)"):
        run(replace(experiment, variants=tuple(longer)), resume=True)
    assert {path: path.read_bytes() for path in done.out.rglob("*") if path.is_file()} == before


def test_a_folder_that_is_not_ours_is_left_alone(done: Done, tmp_path: Path) -> None:
    experiment = replace(done.experiment(), out=tmp_path)
    (tmp_path / "lr=3e-3-seed5").mkdir()
    (tmp_path / "lr=3e-3-seed5/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="no run of this comparison"):
        run(experiment, resume=True)


def test_finished_runs_are_reused(done: Done) -> None:
    experiment = done.experiment()
    lines: list[str] = []
    comparison = run(replace(experiment, variants=experiment.variants[:1]), resume=True, say=lines.append)
    assert lines == ["[1/1] lr=3e-3 · seed 5 · finished before, reused"]
    assert comparison.failed() == []
    # beside a baseline that failed there is no verdict
    (finished,) = comparison.summaries[0].runs
    broken = replace(finished, variant="lr=1e30", error="out of memory", exit_code=6)
    other = replace(experiment, variants=experiment.variants[::-1])
    baseline, variant = summed_up(other, [broken, finished]).summaries
    assert baseline.final_loss is None
    assert variant.verdict is not None
    assert variant.verdict.judgement == "no yardstick"


# what needs no run


def test_dry_run_lists_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--vary", "micro_batch=3,4,8", "--seeds", "2", "--skip-refused", "--out", "there", "--dry-run"]
    assert main(["compare", *flags]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "micro_batch=4 · seed 0 → there/micro_batch=4-seed0"
    assert said[3] == "micro_batch=8 · seed 1 → there/micro_batch=8-seed1"
    assert said[4].startswith("left out: micro_batch=3: global_batch = 16: it does not divide by")
    assert said[5:] == ["nothing was started"]
    assert list(tmp_path.iterdir()) == []
    assert main(["compare", *flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["runs"][3] == {"variant": "micro_batch=8", "seed": 1, "run_dir": "there/micro_batch=8-seed1"}
    assert [each["variant"] for each in plan["refused"]] == ["micro_batch=3"]


def test_a_folder_that_cannot_be_is_that_of_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    for out, why in (("file", "file is not a folder"), ("/proc/nope/x", "")):
        assert main(["compare", "--vary", "lr=1e-3,1e-4", "--out", out]) == 5
        said = capsys.readouterr().err
        assert said.startswith(f"thrice: --out = {out!r} cannot be ")
        assert why in said
        assert "name another --out" in said
        assert "run_dir" not in said
        assert "bytes" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing is varied"),
        (["--varry", "lr=1,2"], "--varry: there is no such key\n  did you mean --vary?"),
        (["--vary", "lr=1,2", "--sedes", "2"], "--sedes: there is no such key\n  did you mean --seeds?"),
        (["--vary", "lr=1,2", "--seeds", "0"], "compare.seeds = 0: it must be at least 1"),
        (["--vary", "lr=1,2", "--trace"], "compare has no such switch"),
        (["--vary", "lr=1,2", "--run_dir", "x"], "--out DIR says where they all are"),
        (["--vary", "micro_batch=3,4"], "micro_batch=3: global_batch = 16: it does not divide"),
    ],
)
def test_what_is_typed_wrong(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import os; os.kill(os.getpid(), 9)", (-9, "killed by SIGKILL; perhaps the system had no memory left")),
        ("print('a'); raise MemoryError", (1, "MemoryError")),
        (
            "import sys; print('thrice: out of memory: 1 GiB\\n  used'); sys.exit(6)",
            (6, "out of memory: 1 GiB\n  used"),
        ),
        (
            "import sys; print('thrice: an earlier one\\nthrice: 1 problem\\n  a: b\\n    → c'); sys.exit(2)",
            (2, "1 problem\n  a: b\n    → c"),
        ),
        ("import sys; sys.exit(3)", (3, "it said nothing")),
        ("print(' 1 a'); print('x')", (0, None)),
    ],
)
def test_why_a_child_failed(
    program: str, expected: tuple[int, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any program stands for the child here: what is tested is how its end is read."""
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: start([sys.executable, "-c", program], **options)
    )
    lines: list[str] = []
    assert train_in_child(tmp_path / "job.toml", tmp_path / "log", resume=False, say=lines.append) == expected
    assert lines == ([" 1 a"] if expected[0] == 0 else [])
