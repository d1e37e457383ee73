"""Stopped and resumed equals never stopped, to the last bit; and what a resume refuses."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import thrice.train
from runs import assert_same_state, metrics, run, saved_steps, stop_after, tiny
from thrice.errors import CheckpointError, Interrupted, UsageError
from thrice.runtime import store
from thrice.spec.job import BatchRamp, Checkpoint, Decoder, Evaluation, Optimizer, Schedule
from thrice.techniques.attention import Attention
from thrice.techniques.optimizer_in_backward import OptimizerInBackward
from thrice.techniques.optimizer_states import OptimizerStates
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import Recompute
from thrice.techniques.vocabulary_loss import VocabularyLoss

FP16 = Precision(mode="fp16", initial_scale=256.0, growth_interval=100)
GROWING = Precision(mode="fp16", initial_scale=256.0, growth_interval=3)
SMALL = {"global_batch": 8, "micro_batch": 4}  # float16 is slow on a CPU
OVERFLOWING = Precision(mode="fp16", initial_scale=2.0**20, growth_interval=100)


pytestmark = pytest.mark.usefixtures("one_thread", "short_sample")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sample ids of each window, in the order in which they were trained on."""
    windows: list[list[int]] = []
    plain = thrice.train.train_step

    def recorded(session, window):
        windows.append([i for batch in window for i in batch.sample_ids])
        return plain(session, window)

    monkeypatch.setattr(thrice.train, "train_step", recorded)
    return windows


def interrupt(job, step: int) -> None:
    with pytest.raises(Interrupted):
        thrice.train.train(job, say=stop_after(step))


CASES = {
    "dropout": (3, {}),
    "before a shorter window": (5, {}),
    "the epoch's end": (6, {}),
    "in the second epoch": (7, {}),
    "last window dropped": (5, {"last_window": "drop"}),
    "bf16, selective": (3, {"techniques": (Precision(mode="bf16"), Recompute(strategy="selective"))}),
    "bf16-pure, stochastic": (3, {"techniques": (Precision(mode="bf16-pure", rounding="stochastic"),)}),
    "bf16-pure, compensated": (3, {"techniques": (Precision(mode="bf16-pure", rounding="compensated"),)}),
    "fp16, growing": (4, {"techniques": (GROWING,), **SMALL}),
    "fp16, overflowing": (2, {"techniques": (OVERFLOWING, Recompute(strategy="every_k")), "max_steps": 4, **SMALL}),
    "sgd": (3, {"optimizer": Optimizer(name="sgd"), "techniques": (Recompute(strategy="full"),)}),
    "sgd without state": (
        3,
        {"optimizer": Optimizer(name="sgd", momentum=0.0), "evaluation": Evaluation(fraction=0.0)},
    ),
    "in the middle of a ramp": (
        2,
        {
            "micro_batch": 8,
            "batch_ramp": BatchRamp(start=16, samples=100),
            "lr_scaling": "sqrt",
            "base_global_batch": 16,
            "schedule": Schedule(decay="wsd", warmup_samples=60),
        },
    ),
    "states in 8 bits": (3, {"optimizer": Optimizer(name="lamb"), "techniques": (OptimizerStates(format="8bit"),)}),
    "lars": (3, {"optimizer": Optimizer(name="lars")}),
    "muon beside AdamW": (3, {"optimizer": Optimizer(name="muon")}),
    "in backward": (
        3,
        {
            "micro_batch": 48,
            "optimizer": Optimizer(clip=None),
            "techniques": (OptimizerStates(format="bf16"), OptimizerInBackward(enabled=True)),
        },
    ),
    "chunked loss, blockwise attention": (
        3,
        {"techniques": (Attention(kernel="flash"), VocabularyLoss(mode="chunked"))},
    ),
    "the loop's AdamW": (3, {"optimizer": Optimizer(implementation="loop")}),
}


@pytest.mark.parametrize("case", CASES)
def test_resume_is_bitwise(case: str, corpus: Path, tmp_path: Path, seen: list[list[int]]) -> None:
    """transformers#39215: 2k steps = k + resume + k; sample ids, metrics, lr and random state too."""
    step, changes = CASES[case]
    job = tiny(corpus, tmp_path / "whole", **changes)
    run(job)
    whole = [*seen]
    seen.clear()
    stopped = replace(job, run_dir=str(tmp_path / "stopped"))
    interrupt(stopped, step)
    assert saved_steps(tmp_path / "stopped") == [step]
    torch.manual_seed(999)  # whatever happens between two processes
    run(stopped, resume=True)
    assert seen == whole
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    assert_same_state(tmp_path / "stopped", tmp_path / "whole", job.steps())


def test_the_epoch_has_a_shorter_window(corpus: Path, tmp_path: Path, seen: list[list[int]]) -> None:
    """The cases above are about what they say; pytorch#31771: each epoch has an order of its own."""
    run(tiny(corpus, tmp_path / "run", max_steps=13))
    assert [len(window) for window in seen] == ([48] * 5 + [43]) * 2 + [48]
    first, second = ([i for window in seen[start : start + 6] for i in window] for start in (0, 6))
    assert sorted(first) == sorted(second) == list(range(283))
    assert first != second


def test_scale_and_counter_are_kept(corpus: Path, tmp_path: Path) -> None:
    """accelerate#4289, transformers#11663: saved at 256, 256 after, the counter too."""
    job = tiny(corpus, tmp_path / "run", techniques=(FP16,), **SMALL)
    interrupt(job, 4)
    _, state = store.load(tmp_path / "run/checkpoints/step-00000004")
    assert state["scaler"] == {"scale": 256.0, "good_steps": 4, "skipped_in_row": 0}
    run(job, resume=True)
    assert {row["loss_scale"] for row in metrics(tmp_path / "run") if "loss" in row} == {256.0}
    _, state = store.load(tmp_path / "run/checkpoints/step-00000008")
    assert state["scaler"] == {"scale": 256.0, "good_steps": 8, "skipped_in_row": 0}


def test_skipped_windows_are_neither_lost_nor_seen_twice(corpus: Path, tmp_path: Path, seen: list[list[int]]) -> None:
    """Interrupted in the midst of overflows: the rows of skipped windows stay, and none is repeated."""
    job = tiny(corpus, tmp_path / "whole", techniques=(OVERFLOWING,), max_steps=3, **SMALL)
    run(job)
    whole = [*seen]
    skipped = [row for row in metrics(tmp_path / "whole") if row.get("taken") is False]
    assert len(skipped) >= 2
    stopped = replace(job, run_dir=str(tmp_path / "stopped"))
    calls = iter(range(100))

    def say(line: str) -> None:
        if "step skipped" in line and next(calls) == 0:
            stop_after(1)("1")

    seen.clear()
    with pytest.raises(Interrupted):
        thrice.train.train(stopped, say=say)
    assert saved_steps(tmp_path / "stopped") == [0]
    run(stopped, resume=True)
    assert seen == whole
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    assert_same_state(tmp_path / "stopped", tmp_path / "whole", 3)


def test_resume_with_another_micro_batch(corpus: Path, tmp_path: Path, seen: list[list[int]]) -> None:
    """The same samples in the same order, equal to rounding; SGD, which does not turn rounding into a step."""
    plain = {"decoder": Decoder(layers=2, hidden=32, heads=2), "optimizer": Optimizer(name="sgd")}
    job = tiny(corpus, tmp_path / "whole", **plain)
    run(job)
    whole = [*seen]
    seen.clear()
    stopped = replace(job, run_dir=str(tmp_path / "stopped"))
    interrupt(stopped, 3)
    lines = run(replace(stopped, micro_batch=8), resume=True)
    assert "resume     changed micro_batch: saved 24, now 8" in lines
    assert seen == whole
    got, expected = (
        store.load(tmp_path / name / "checkpoints/step-00000008")[0]["weights"] for name in ("stopped", "whole")
    )
    for name, tensor in expected.items():
        # 5 steps of fp32 sums in another order: some units in the last place, 6e-8 each
        assert (got[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def test_a_finished_run_is_left_as_it_is(corpus: Path, tmp_path: Path, seen: list[list[int]]) -> None:
    job = tiny(corpus, tmp_path / "run")
    outcome = thrice.train.train(job, say=lambda line: None)
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    seen.clear()
    lines: list[str] = []
    assert thrice.train.train(job, resume=True, say=lines.append) == outcome
    assert seen == []
    assert lines[-1] == "resume     the run is finished: 8 of 8 steps, nothing is left to do"
    assert files == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_a_finished_run_goes_on_with_more_steps(corpus: Path, tmp_path: Path, seen: list[list[int]]) -> None:
    steady = {"schedule": Schedule(decay="constant"), "evaluation": Evaluation(fraction=0.05)}
    job = tiny(corpus, tmp_path / "run", **steady)
    run(job)
    lines = run(replace(job, max_steps=10), resume=True)
    assert "resume     changed max_steps: saved 8, now 10" in lines
    run(replace(job, max_steps=10, run_dir=str(tmp_path / "whole")))
    assert_same_weights(tmp_path / "run", tmp_path / "whole", 10)
    steps = [row["step"] for row in metrics(tmp_path / "run") if "loss" in row]
    assert steps == list(range(1, 11))


def assert_same_weights(got: Path, expected: Path, step: int) -> None:
    ours, theirs = (store.load(f / "checkpoints" / f"step-{step:08d}")[0]["weights"] for f in (got, expected))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_final_evaluation_after_a_kill_just_before_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step is saved before the last evaluation; a run that died in between is completed, once."""
    job = tiny(corpus, tmp_path / "whole")
    run(job)
    died = replace(job, run_dir=str(tmp_path / "died"))
    plain = thrice.train.evaluate

    def dying(session, batches):
        if session.progress.step == 8:
            raise KeyError("died here")
        return plain(session, batches)

    with monkeypatch.context() as patch:
        patch.setattr(thrice.train, "evaluate", dying)
        with pytest.raises(KeyError, match="died here"):
            run(died)
    assert [row for row in metrics(tmp_path / "died") if row["step"] == 8 and "validation_loss" in row] == []
    run(died, resume=True)
    run(died, resume=True)
    assert metrics(tmp_path / "died") == metrics(tmp_path / "whole")


@pytest.mark.parametrize("made", [False, True])
def test_resume_with_nothing_to_resume(made: bool, corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "run", max_steps=2)
    if made:
        (tmp_path / "run/checkpoints").mkdir(parents=True)
    lines = run(job, resume=True)
    assert f"resume     {tmp_path / 'run'} has no checkpoint yet: starting from the beginning" in lines
    run(replace(job, run_dir=str(tmp_path / "plain")))
    assert_same_state(tmp_path / "run", tmp_path / "plain", 2)


def _truncate(folder: Path) -> None:
    file = folder / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _tamper(folder: Path) -> None:
    raw = bytearray((folder / "optimizer.safetensors").read_bytes())
    raw[-5] ^= 1
    (folder / "optimizer.safetensors").write_bytes(raw)


def _pickle(folder: Path) -> None:
    (folder / "weights.safetensors").write_bytes(pickle.dumps({"w": [1.0]}))


def _empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


DAMAGES = {
    "truncated": (_truncate, r"weights\.safetensors has [\d,]+ bytes, [\d,]+ were written"),
    "tampered": (_tamper, r"optimizer\.safetensors does not hold the bytes that were written"),
    "pickled": (_pickle, r"weights\.safetensors \(a pickle, which thrice never loads\)"),
    "empty": (_empty, r"manifest\.json is missing"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run(tiny(corpus, folder, checkpoint=Checkpoint(every_steps=2, keep_last=2)))
    torch.set_num_threads(threads)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest(damage: str, corpus: Path, tmp_path: Path, whole: Path) -> None:
    """The one before is taken; which was rejected and why is said; the end is as if nothing had happened."""
    job = tiny(corpus, tmp_path / "run", checkpoint=Checkpoint(every_steps=2, keep_last=2))
    interrupt(job, 5)
    assert saved_steps(tmp_path / "run") == [4, 5]
    act, why = DAMAGES[damage]
    act(tmp_path / "run/checkpoints/step-00000005")
    lines = run(job, resume=True)
    assert lines[0].startswith(f"resume     rejected {tmp_path}/run/checkpoints/step-00000005: ")
    assert re.search(why, lines[0])
    assert f"resume     from {tmp_path}/run/checkpoints/step-00000004, after step 4" in lines
    assert metrics(tmp_path / "run") == metrics(whole)
    assert_same_state(tmp_path / "run", whole, 8)


def test_a_later_branch_never_mixes_in(corpus: Path, tmp_path: Path) -> None:
    """Resumed from an older step under another rate, past the damaged newer one: that one is never counted
    again, and the metrics are those of one branch."""
    job = tiny(corpus, tmp_path / "run", checkpoint=Checkpoint(every_steps=2, keep_last=3))
    interrupt(job, 6)
    newest = tmp_path / "run/checkpoints/step-00000006"
    weights = (newest / "weights.safetensors").read_bytes()
    _truncate(newest)
    slower = replace(job, lr=1e-4, max_steps=6)
    run(slower, resume=True)
    assert saved_steps(tmp_path / "run")[-1] == 6
    assert (newest / "weights.safetensors").read_bytes() != weights
    rows = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["lr"] > 1e-4 for row in rows] == [True] * 4 + [False] * 2


def test_every_checkpoint_damaged(corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "run", checkpoint=Checkpoint(every_steps=2, keep_last=2))
    interrupt(job, 5)
    for step in (4, 5):
        _tamper(tmp_path / f"run/checkpoints/step-{step:08d}")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    lines: list[str] = []
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* can be used \(2 rejected") as caught:
        thrice.train.train(job, resume=True, say=lines.append)
    assert caught.value.exit_code == 5
    assert [line[:19] for line in lines] == ["resume     rejected"] * 2
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


FORBIDDEN = {
    "seed": ({"seed": 6}, "seed: saved 5, now 6"),
    "global_batch": ({"global_batch": 24}, "global_batch: saved 48, now 24"),
    "sequence": ({"sequence": 16}, "sequence: saved 32, now 16"),
    "last_window": ({"last_window": "drop"}, 'last_window: saved "step", now "drop"'),
    "decoder": ({"decoder": Decoder(layers=3, hidden=32, heads=2)}, "decoder.layers: saved 2, now 3"),
    "optimizer": ({"optimizer": Optimizer(name="sgd")}, 'optimizer.name: saved "adamw", now "sgd"'),
    "split": ({"evaluation": Evaluation(fraction=0.1)}, "evaluation.fraction: saved 0.02, now 0.1"),
    "ramp": ({"batch_ramp": BatchRamp(start=24, samples=9)}, "batch_ramp.start: saved not given, now 24"),
    "precision": ({"techniques": (Precision(mode="bf16"),)}, 'precision.mode: saved "fp32", now "bf16"'),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    interrupt(tiny(corpus, folder), 3)
    return folder


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_may_not_change(what: str, corpus: Path, stopped: Path) -> None:
    changes, shown = FORBIDDEN[what]
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"cannot go on from .*step-00000003: what has to stay") as caught:
        run(tiny(corpus, stopped, **changes), resume=True)
    assert f"  {shown}\n" in str(caught.value)
    assert before == {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}


def test_other_data_is_refused(corpus: Path, stopped: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(corpus.read_text().replace("e", "o"))
    with pytest.raises(UsageError, match=r"data \(SHA-256 of its tokens\): saved [0-9a-f]{12}, now [0-9a-f]{12}"):
        run(tiny(other, stopped), resume=True)


def test_the_same_data_elsewhere_is_the_same(corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "run")
    interrupt(job, 3)
    moved = tmp_path / "moved.txt"
    moved.write_bytes(corpus.read_bytes())
    (tmp_path / "run").rename(tmp_path / "renamed")
    lines = run(replace(job, data=(str(moved),), run_dir=str(tmp_path / "renamed")), resume=True)
    assert not [line for line in lines if "changed" in line]


def test_what_may_change_is_said_and_used(corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "run", schedule=Schedule(decay="constant"))
    interrupt(job, 3)
    other = replace(
        job,
        lr=1e-3,
        max_steps=6,
        micro_batch=48,
        techniques=(Precision(mode="fp32"), Recompute(strategy="full")),  # float32 was what no precision meant
        optimizer=Optimizer(weight_decay=0.0),
    )
    lines = run(other, resume=True)
    said = {line.removeprefix("resume     changed ") for line in lines if line.startswith("resume     changed ")}
    assert said == {
        "lr: saved 0.003, now 0.001",
        "max_steps: saved 8, now 6",
        "micro_batch: saved 24, now 48",
        'recompute.strategy: saved not given, now "full"',
        "optimizer.weight_decay: saved 0.1, now 0.0",
    }
    rows = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert [row["lr"] for row in rows] == [3e-3] * 3 + [1e-3] * 3
    assert len(rows) == 6
