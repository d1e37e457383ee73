"""The training loop: what it leaves behind, when it stops, and what survives whatever ends it."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import thrice.train
from runs import assert_same_state, exit_code, forked, metrics, run, saved_steps, stop_after, tiny
from thrice.cli import main
from thrice.data.batches import Batch, Samples
from thrice.data.load import load_data
from thrice.errors import DataError, Diverged, Interrupted, UsageError
from thrice.job_file import load_job
from thrice.runtime import store
from thrice.spec.job import BatchRamp, Checkpoint, Evaluation, Schedule
from thrice.techniques.precision import Precision
from thrice.train import remarks

pytestmark = pytest.mark.usefixtures("one_thread", "short_sample")


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in metrics(run_dir) if "loss" in row]


# what a run leaves behind


def test_run_folder(corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "runs/first", max_steps=5, checkpoint=Checkpoint(every_steps=1, keep_last=2))
    outcome = thrice.train.train(job, say=lambda line: None)
    folder = tmp_path / "runs/first"
    assert sorted(os.listdir(folder)) == ["checkpoints", "job.toml", "latest", "metrics.jsonl", "record.json"]
    assert saved_steps(folder) == [4, 5]
    assert (folder / "latest").read_text() == "checkpoints/step-00000005\n"
    assert load_job(folder / "job.toml") == job
    record = json.loads((folder / "record.json").read_text())
    assert record["asked"] == (folder / "job.toml").read_text()
    assert record["applied"]["claim"] == "ROUNDING"
    assert record["applied"]["ledger"]["grad_accum_steps"] == 2
    assert record["measured"] == {**record["measured"], "steps": 5, "loss": losses(folder)[-1]}
    assert record["measured"]["validation_loss"] == outcome.validation_loss
    assert len(outcome.sample) >= 32
    assert outcome.tokens_per_s > 0


def test_metrics_rows(corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "run", evaluation=Evaluation(every_steps=2))
    run(job)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["epoch"] for row in steps] == [0] * 6 + [1] * 2
    # each target of the epoch once; the sixth window is its last, shorter one
    data = thrice.train.load_data(job)
    assert sum(row["tokens"] for row in steps[:6]) == data.train.batch(np.arange(len(data.train))).count
    assert steps[5]["tokens"] <= (len(data.train) - 5 * 48) * 32
    # warm-up over 3 steps from a third of the peak; the cosine's end lies one step past the last
    assert [row["lr"] for row in steps[:3]] == pytest.approx([1e-3, 2e-3, 3e-3], rel=1e-12)
    assert set(steps[0]) == {
        "step", "taken", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "peak_bytes", "epoch"
    }  # fmt: skip
    assert all(row["mfu"] is None for row in steps), "no peak rate is known here"
    checked = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in checked] == [2, 4, 6, 8]
    assert len({row["validation_tokens"] for row in checked}) == 1


def test_job_file_of_a_run_reproduces_it(corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "run", max_steps=4, techniques=(Precision(mode="bf16"),))
    run(job)
    again = load_job(tmp_path / "run/job.toml", [("run_dir", str(tmp_path / "again"))])
    run(again)
    assert metrics(tmp_path / "again") == metrics(tmp_path / "run")
    assert_same_state(tmp_path / "again", tmp_path / "run", 4)


def test_trace_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "plain", max_steps=4)
    run(job)
    lines = run(replace(job, run_dir=str(tmp_path / "traced")), trace=True)
    assert metrics(tmp_path / "traced") == metrics(tmp_path / "plain")
    assert_same_state(tmp_path / "traced", tmp_path / "plain", 4)
    trace = json.loads((tmp_path / "traced/trace.json").read_text())
    assert trace["step"] == 2
    assert sum(trace["at_peak"].values()) == trace["peak_bytes"]
    assert trace["at_peak"]["optimizer_states"] > 2 * 4 * 40_000
    assert trace["flops_by_phase"]["backward"] > trace["flops_by_phase"]["forward"] > 0
    assert [line for line in lines if "traced: peak" in line and "trace.json" in line]


def test_trace_of_a_single_step(corpus: Path, tmp_path: Path) -> None:
    run(tiny(corpus, tmp_path / "run", max_steps=1), trace=True)
    assert json.loads((tmp_path / "run/trace.json").read_text())["step"] == 1


# when it stops


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ({"max_steps": 3}, 3),
        ({"max_steps": None, "max_tokens": 3 * 48 * 32}, 3),
        ({"max_steps": None, "max_tokens": 3 * 48 * 32 + 1}, 4),
    ],
)
def test_exactly_the_steps_asked_for(asked: dict, steps: int, corpus: Path, tmp_path: Path) -> None:
    """litgpt: max_steps 3 was accepted and ignored (102 steps)."""
    outcome = thrice.train.train(tiny(corpus, tmp_path / "run", **asked), say=lambda line: None)
    assert outcome.steps == len(losses(tmp_path / "run")) == steps
    assert saved_steps(tmp_path / "run") == [steps]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_is_saved(number: signal.Signals, code: int, corpus: Path, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=f"{number.name} after step 3: the step was finished and saved") as caught:
        thrice.train.train(tiny(corpus, tmp_path / "run"), say=stop_after(3, number))
    assert caught.value.exit_code == code
    assert saved_steps(tmp_path / "run") == [3]
    assert signal.getsignal(number) is before


def test_the_second_interrupt_acts_at_once(corpus: Path, tmp_path: Path) -> None:
    def say(line: str) -> None:
        if line.split()[:1] == ["5"]:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    job = tiny(corpus, tmp_path / "run", checkpoint=Checkpoint(every_steps=2))
    with pytest.raises(Interrupted, match="stopped at once, 5 steps were taken; step 4 is saved: --resume") as caught:
        thrice.train.train(job, say=say)
    assert caught.value.exit_code == 130
    assert saved_steps(tmp_path / "run") == [2, 4]


def test_a_reader_that_goes_away_loses_no_step(corpus: Path, tmp_path: Path) -> None:
    def say(line: str) -> None:
        if line.split()[:1] == ["3"]:
            raise BrokenPipeError

    job = tiny(corpus, tmp_path / "run")
    with pytest.raises(BrokenPipeError):
        thrice.train.train(job, say=say)
    assert saved_steps(tmp_path / "run") == [3]
    run(job, resume=True)
    run(replace(job, run_dir=str(tmp_path / "whole")))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_divergence_keeps_the_last_good_state(corpus: Path, tmp_path: Path) -> None:
    """The step before the one that is not finite is saved, and a resume with another rate goes on from it."""
    wild = tiny(corpus, tmp_path / "run", lr=1e6, schedule=Schedule(decay="constant"))
    with pytest.raises(Diverged, match=r"step \d is not finite[^\n]*nothing was updated") as caught:
        run(wild)
    assert caught.value.exit_code == 1
    (step,) = saved_steps(tmp_path / "run")
    assert f"the state after step {step} is saved: --resume goes on from it" in str(caught.value)
    assert len(losses(tmp_path / "run")) == step
    tensors, _ = store.load(tmp_path / f"run/checkpoints/step-{step:08d}")
    assert all(bool(tensor.isfinite().all()) for tensor in tensors["weights"].values())


def test_divergence_at_the_very_end_is_seen(corpus: Path, tmp_path: Path) -> None:
    """A last step that spoils the weights is followed by no other step that would notice."""
    wild = {"lr": 1e39, "max_steps": 1, "schedule": Schedule()}
    with pytest.raises(Diverged, match=r"the validation loss is (nan|inf) after step 1"):
        run(tiny(corpus, tmp_path / "run", **wild))
    with pytest.raises(Diverged, match="what the model puts out is not finite after step 1"):
        run(tiny(corpus, tmp_path / "none", **wild, evaluation=Evaluation(fraction=0.0)))
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_float16_that_overflows_for_ever(corpus: Path, tmp_path: Path) -> None:
    """A run that skips N steps in a row stops with an explanation; nothing has moved."""
    precision = Precision(mode="fp16", initial_scale=2.0**60, max_skipped_steps=3)
    job = tiny(corpus, tmp_path / "run", global_batch=8, micro_batch=4, techniques=(precision,))
    with pytest.raises(Diverged, match="3 steps in a row overflowed in float16 at step 1"):
        run(job)
    assert saved_steps(tmp_path / "run") == [0]
    assert [row["taken"] for row in metrics(tmp_path / "run")] == [False, False]


def test_bad_data_keeps_the_steps_before_it(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = thrice.train.train_step

    def spoilt(session, window):
        if session.progress.step == 3:
            raise DataError("the data of step 4 holds values that are not finite (samples 7)")
        return plain(session, window)

    monkeypatch.setattr(thrice.train, "train_step", spoilt)
    with pytest.raises(DataError, match="the state after step 3 is saved: --resume goes on from it"):
        run(tiny(corpus, tmp_path / "run"))
    assert saved_steps(tmp_path / "run") == [3]


# where it may not be kept


def test_an_existing_run_is_left_alone(corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "run", max_steps=1)
    run(job)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="is not empty, and nothing in it is overwritten\n  --resume goes on"):
        run(job)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_an_empty_folder_is_no_run(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run(tiny(corpus, tmp_path / "run", max_steps=1))
    assert saved_steps(tmp_path / "run") == [1]


def test_run_dir_that_cannot_be_made(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(thrice.train, "load_data", lambda job: pytest.fail("the folder is looked at first"))
    for path in ("file", "file/run", "file/deep/run"):
        for resume in (False, True):
            with pytest.raises(DataError, match=f"run_dir = .*{path}.* cannot be made: .*file is not a folder"):
                run(tiny(corpus, tmp_path / path), resume=resume)
    with pytest.raises(DataError, match=r"run_dir = '/dev/null/run' cannot be made"):
        run(tiny(corpus, Path("/dev/null/run")))
    assert (tmp_path / "file").read_text() == "mine"


def test_run_dir_that_cannot_be_written(corpus: Path, tmp_path: Path) -> None:
    """As a user whom permissions bind, which a superuser has to become first."""
    (tmp_path / "closed").mkdir(mode=0o555)
    job = tiny(corpus, tmp_path / "closed/run")

    def act() -> int:
        if os.getuid() == 0:
            os.setuid(65534)
        with pytest.raises(DataError, match=r"run_dir = .* cannot be written: .*closed is read-only for this user"):
            run(job)
        return 0

    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        folder.chmod(0o755)
    assert exit_code(forked(act, Path("/dev/null"))) == 0
    assert os.listdir(tmp_path / "closed") == []


# what survives


def test_full_disk_at_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    """A limit on the size of a file stands for the disk; the checkpoint before is whole, and goes on."""
    job = tiny(corpus, tmp_path / "run", checkpoint=Checkpoint(every_steps=2))
    run(replace(job, run_dir=str(tmp_path / "whole")))
    with pytest.raises(Interrupted):
        thrice.train.train(job, say=stop_after(2))

    def act() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        return main(["train", str(tmp_path / "run/job.toml"), "--resume"])

    output = tmp_path / "output"
    assert exit_code(forked(act, output)) == 5
    assert "thrice: the checkpoint of step 4 cannot be written" in output.read_text()
    assert "what was saved before is intact" in output.read_text()
    assert "Traceback" not in output.read_text()
    assert os.listdir(tmp_path / "run/checkpoints") == ["step-00000002"]
    run(job, resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert_same_state(tmp_path / "run", tmp_path / "whole", 8)


def test_full_disk_at_a_metrics_row(corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "run", max_steps=40, global_batch=8, micro_batch=8)

    def act() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
        try:
            run(job)
        except DataError as error:
            print(error)
            return error.exit_code
        return 0

    output = tmp_path / "output"
    assert exit_code(forked(act, output)) == 5
    assert "metrics.jsonl c" in output.read_text()
    assert "Traceback" not in output.read_text()


def test_killed_at_any_moment(corpus: Path, tmp_path: Path) -> None:
    """kill -9 of a run that saves every step: what is left always loads, and the end is that of a run never killed."""
    job = tiny(
        corpus,
        tmp_path / "killed",
        max_steps=40,
        global_batch=16,
        micro_batch=16,
        checkpoint=Checkpoint(every_steps=1, keep_last=2),
        evaluation=Evaluation(every_steps=5, max_samples=2),
    )
    run(replace(job, run_dir=str(tmp_path / "whole")))
    moments = random.Random(11)
    reached = [0]
    for _ in range(6):
        child = forked(lambda: len(run(job, resume=True)) * 0, tmp_path / "output")
        _wait_for_a_step(tmp_path / "killed", reached[-1])
        time.sleep(moments.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL, (tmp_path / "output").read_text()
        path, rejected = store.latest(tmp_path / "killed/checkpoints")
        assert path is not None
        assert rejected == []
        reached.append(int(path.name.removeprefix("step-")))
    assert reached == sorted(reached)
    assert 6 <= reached[-1] < 40, "the kills came while it was training"
    run(job, resume=True)
    assert_same_state(tmp_path / "killed", tmp_path / "whole", 40)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    assert [name for name in os.listdir(tmp_path / "killed/checkpoints") if name.startswith(".")] == []


def _wait_for_a_step(run_dir: Path, step: int) -> None:
    for _ in range(6000):
        if (run_dir / "checkpoints").is_dir() and max(saved_steps(run_dir), default=0) > step:
            return
        time.sleep(0.01)
    pytest.fail(f"no step after {step} was saved within a minute")


def test_a_real_process_is_interrupted(corpus: Path, tmp_path: Path) -> None:
    """`python -m thrice.cli`, the terminal's Ctrl-C, and the same to the last bit after --resume."""
    job = tiny(corpus, tmp_path / "run", max_steps=40, global_batch=16, micro_batch=16)
    file = tmp_path / "job.toml"
    file.write_text(thrice.train.dump(job))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "thrice.cli", "train", str(file)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.split()[:1] == ["5"]:
                process.send_signal(signal.SIGINT)
                break
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "finishing this step, then saving" in errors
    assert "SIGINT after step" in errors
    assert "Traceback" not in errors
    (step,) = saved_steps(tmp_path / "run")
    assert 5 <= step < 40
    run(job, resume=True)
    run(replace(job, run_dir=str(tmp_path / "whole")))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert_same_state(tmp_path / "run", tmp_path / "whole", 40)


# what is counted


def test_evaluation_counts_each_sample_once(corpus: Path, tmp_path: Path) -> None:
    """pytorch#25162: 14 held-out samples in micro-batches of 4 are 14, and the loss is that of one batch of 14."""
    job = tiny(
        corpus, tmp_path / "run", max_steps=1, global_batch=4, micro_batch=4, evaluation=Evaluation(fraction=0.05)
    )
    run(job)
    (row,) = [row for row in metrics(tmp_path / "run") if "validation_loss" in row]
    data = thrice.train.load_data(job)
    whole = data.validation.batch(np.arange(len(data.validation)))
    assert len(data.validation) % 4
    assert row["validation_tokens"] == whole.count == len(data.validation) * 32
    assert isinstance(data.validation, Samples)
    session = thrice.train.compose(job, vocabulary=256)
    thrice.train.checkpoint.restore(session, tmp_path / "run/checkpoints/step-00000001", data.store.fingerprint)
    session.model.eval()
    with torch.no_grad():
        logits = session.model(whole.inputs)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), whole.targets.flatten())
    # fp32 sums of some hundred terms in another order
    assert row["validation_loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_a_part_of_the_held_out_samples_is_spread_over_all_of_them(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny(corpus, tmp_path / "run", evaluation=Evaluation(fraction=0.3, max_samples=6))
    seen: list[int] = []

    def counting(session: object, batches: Iterable[Batch]) -> tuple[float, int]:
        seen.extend(sample for batch in batches for sample in batch.sample_ids)
        return 1.0, 1

    monkeypatch.setattr("thrice.train.evaluate", counting)
    run(replace(job, max_steps=1))
    held_out = len(load_data(job).validation)
    assert held_out > 12
    assert seen == [position * held_out // 6 for position in range(6)], "each once, a sixth of the way apart"


def test_a_traced_step_begins_with_what_is_there_and_knows_its_inputs(corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "run", max_steps=3)
    run(job, trace=True)
    trace = json.loads((tmp_path / "run" / "trace.json").read_bytes())
    first, ledger = trace["timeline"][0]["bytes"], job.ledger()
    assert first["parameters"] == trace["at_end"]["parameters"] > 0
    assert first["optimizer_states"] == trace["at_end"]["optimizer_states"] > first["parameters"]
    tokens = 2 * 8 * ledger.tokens_per_step  # inputs and targets, int64
    assert first["inputs"] == trace["at_peak"]["inputs"] == tokens


def test_what_is_perhaps_not_meant_is_said(corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "run", max_steps=2, schedule=Schedule())
    assert not list(remarks(job, 1000))
    long = replace(job, schedule=Schedule(warmup_steps=20))
    assert ["warmup_steps 20" in line for line in remarks(long, 1000)] == [True]
    assert ["3 samples" in line for line in remarks(job, 3)] == [True]
    assert any("warmup_steps 20" in line for line in run(long))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": Schedule(warmup_samples=337)}, "warmup_samples 337 is as long as the run of 8 steps"),
        ({"schedule": Schedule(decay="wsd", decay_steps=100)}, "decay_steps 100 is longer than"),
        ({"schedule": Schedule(decay="wsd", warmup_steps=4, decay_steps=5)}, "decay_steps 5 is longer than"),
        ({"schedule": Schedule(decay="wsd", warmup_samples=192, decay_steps=5)}, "decay_steps 5 is longer than"),
        ({"schedule": Schedule(decay="constant", min_lr_ratio=0.5)}, "min_lr_ratio 0.5 does nothing"),
        ({"base_global_batch": 4}, "base_global_batch 4 does nothing: lr_scaling is none, so lr 0.003 is used"),
        ({"batch_ramp": BatchRamp(start=24, samples=193)}, "its last step has 24 samples, not 48"),
    ],
)
def test_a_setting_that_the_run_is_too_short_for_or_does_not_use_is_said(changes, words) -> None:
    (line,) = remarks(tiny(Path("c"), Path("r"), **changes), 1000)
    assert words in line


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": Schedule(warmup_samples=336)},
        {"schedule": Schedule(decay="wsd", warmup_steps=4, decay_steps=4)},
        {"schedule": Schedule(decay="constant")},
        {"lr_scaling": "linear", "base_global_batch": 4},
        {"batch_ramp": BatchRamp(start=24, samples=168)},
        # 3 of 8 steps, and a quarter of the samples: those are what the schedule counts here
        {
            "batch_ramp": BatchRamp(start=24, samples=96),
            "schedule": Schedule(decay="wsd", warmup_steps=3, decay_steps=6),
        },
    ],
)
def test_a_setting_that_has_its_effect_is_not_remarked_on(changes) -> None:
    assert not list(remarks(tiny(Path("c"), Path("r"), **changes), 1000))
