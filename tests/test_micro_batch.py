"""micro_batch = "auto": what fits is rehearsed, what pays is measured, and global_batch stays what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import thrice.micro_batch
import thrice.techniques.vocabulary_loss
from thrice.cli import main
from thrice.compose import compose
from thrice.data.load import load_data
from thrice.errors import ConfigError, Infeasible
from thrice.job_file import load_job
from thrice.micro_batch import FREE_SHARE, candidates, settled
from thrice.observe.rehearse import rehearse
from thrice.spec.job import BatchRamp, Decoder, Job
from thrice.techniques.recompute import Recompute
from thrice.techniques.sync_batchnorm import SyncBatchNorm
from thrice.techniques.vocabulary_loss import VocabularyLoss
from thrice.verify import verify


def job_for(corpus: Path, **changes: object) -> Job:
    wanted = {
        "data": (str(corpus),), "sequence": 32, "global_batch": 12, "micro_batch": "auto", "max_steps": 4, "lr": 1e-3,
        "decoder": Decoder(layers=2, hidden=32, heads=4),
    }  # fmt: skip
    return Job(**{**wanted, **changes})


def test_candidates_divide_every_window() -> None:
    assert candidates(job_for(Path("x"))) == [1, 2, 3, 4, 6, 12]
    ramped = job_for(Path("x"), global_batch=24, batch_ramp=BatchRamp(start=8, increment=8, samples=99))
    assert candidates(ramped) == [1, 2, 4, 8]
    assert candidates(job_for(Path("x"), global_batch=24, batch_ramp=BatchRamp(start=12, increment=4, samples=9))) == [
        1, 2, 4,
    ]  # fmt: skip


def test_a_number_is_left_alone(corpus: Path) -> None:
    job = job_for(corpus, micro_batch=3)
    assert settled(job, say=lambda line: pytest.fail(line)) is job


@pytest.mark.parametrize("fits", [1, 2, 3, 4, 6, 12])
def test_the_largest_that_fits_by_rehearsal(corpus: Path, fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(corpus)
    exact = rehearse(replace(job, micro_batch=fits), 256).peak_bytes
    monkeypatch.setattr(thrice.micro_batch.memory, "free_bytes", lambda device: int(exact / FREE_SHARE) + 1)
    lines: list[str] = []
    chosen = settled(job, measure=False, say=lines.append)
    assert chosen == replace(job, micro_batch=fits)
    assert f"auto: {fits}" in lines[0]
    if fits < 12:
        assert "would not fit" in lines[0]


def test_where_nothing_fits_it_says_how_much_is_wanted(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thrice.micro_batch.memory, "free_bytes", lambda device: 10_000)
    with pytest.raises(Infeasible, match="not even 1 fits") as caught:
        settled(job_for(corpus), measure=False)
    assert "8.301 KiB can be used" in str(caught.value)


def test_no_larger_than_the_samples_there_are(corpus: Path) -> None:
    whole = load_data(job_for(corpus, micro_batch=1)).train
    batch = 6 * len(whole)
    job = job_for(corpus, global_batch=batch)
    largest = max(size for size in candidates(job) if size <= 1.05 * len(whole))
    assert largest < batch
    assert settled(job, measure=False, say=lambda line: None).micro_batch == largest
    uncut = replace(job, techniques=(SyncBatchNorm(enabled=True),))
    assert settled(uncut, measure=False, say=lambda line: None).micro_batch == batch, "where that is all it can be"


def test_a_budget_below_the_minimum_of_a_size_rules_the_size_out(corpus: Path) -> None:
    """recompute.budget_bytes is for one micro-batch: a larger one needs more at least."""
    job = job_for(corpus, techniques=(Recompute(strategy="budget", budget_bytes=1),))
    with pytest.raises(Infeasible, match="budget_bytes = 1: the blocks hold at least") as caught:
        settled(job, measure=False)
    assert 'micro_batch = "auto": not even 1 fits' in str(caught.value)
    with pytest.raises(Infeasible) as caught:
        rehearse(replace(job, micro_batch=2), 256)
    least = int(str(caught.value).partition("→ budget_bytes = ")[2].partition(",")[0])
    job = replace(job, techniques=(Recompute(strategy="budget", budget_bytes=least),))
    assert settled(job, measure=False, say=lambda line: None).micro_batch == 2


def test_measured_choices_are_the_same_training(corpus: Path) -> None:
    job = job_for(corpus)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    lines: list[str] = []
    chosen = settled(job, say=lines.append)
    assert torch.equal(torch.get_rng_state(), before), "measuring draws no random number of the run's"
    assert chosen.ledger().global_batch == 12
    assert chosen.micro_batch in candidates(job)
    assert "samples/s" in lines[0]
    assert verify(chosen, load_data(chosen), steps=2).ok


def test_what_pays(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of a micro-batch by its size: twice the samples in the same time pay, until they do not."""
    seconds = {1: 1.0, 2: 1.0, 3: 1.0, 6: 1.99, 12: 3.99}  # 4 is too near to 3 to tell apart
    monkeypatch.setattr(thrice.micro_batch, "_micro_batch_s", lambda job, vocabulary: seconds[job.micro_batch])
    assert settled(job_for(corpus), say=lambda line: None).micro_batch == 3, "6 and 12 are no faster per sample"
    seconds[12] = 2.0
    assert settled(job_for(corpus), say=lambda line: None).micro_batch == 12
    seconds.update({2: 1.9, 3: 4.5})
    assert settled(job_for(corpus), say=lambda line: None).micro_batch == 2, "a size that is far slower ends it"


def test_what_is_refused_at_every_size_is_refused(corpus: Path) -> None:
    lines: list[str] = []
    whole = job_for(corpus, techniques=(SyncBatchNorm(enabled=True),))
    assert settled(whole, measure=False, say=lines.append).micro_batch == 12
    assert "auto: 12, the only one that goes with sync_batchnorm (" in lines[0], "the smaller would fit"
    with pytest.raises(ConfigError, match="keep one of batch_ramp and sync_batchnorm"):
        settled(replace(whole, batch_ramp=BatchRamp(start=4, samples=8)), measure=False)
    with pytest.raises(ConfigError):
        compose(job_for(corpus), vocabulary=256)


def test_a_run_that_goes_on_keeps_what_was_chosen(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    short_sample: None,
) -> None:
    seconds = iter([1.0, 0.5] + [9.0] * 99)
    monkeypatch.setattr(thrice.micro_batch, "_micro_batch_s", lambda job, vocabulary: next(seconds))
    file = tmp_path / "job.toml"
    file.write_text(
        f'data = ["{corpus}"]\nsequence = 32\nglobal_batch = 8\nmicro_batch = "auto"\nmax_steps = 2\n'
        f'run_dir = "{tmp_path / "run"}"\n[decoder]\nlayers = 1\nhidden = 32\nheads = 2\n'
    )
    assert main(["train", str(file)]) == 0
    assert "micro_batch auto: 2" in capsys.readouterr().out
    assert load_job(tmp_path / "run" / "job.toml").micro_batch == 2
    assert main(["train", str(file), "--resume", "--max_steps", "3"]) == 0
    assert "micro_batch 2" in capsys.readouterr().out


@pytest.mark.parametrize("whole", [True, False])
def test_a_run_that_goes_on_keeps_its_vocabulary_loss(
    whole: bool,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    short_sample: None,
) -> None:
    timed = [[0.1, 0.9] if whole else [0.9, 0.1]]
    monkeypatch.setattr(thrice.techniques.vocabulary_loss, "_fastest_s", lambda *_: timed.pop())
    file = tmp_path / "job.toml"
    file.write_text(
        f'data = ["{corpus}"]\nsequence = 32\nglobal_batch = 8\nmax_steps = 2\nrun_dir = "{tmp_path / "run"}"\n'
        'vocabulary_loss = "auto"\n[decoder]\nlayers = 1\nhidden = 32\nheads = 2\n'
    )
    assert main(["train", str(file)]) == 0
    (kept,) = load_job(tmp_path / "run" / "job.toml").techniques
    assert kept == VocabularyLoss(mode="whole" if whole else "chunked")
    capsys.readouterr()
    assert main(["train", str(file), "--resume", "--max_steps", "3"]) == 0
    out = capsys.readouterr().out
    assert ("the whole matrix of logits" if whole else "tokens at a time") in out
    assert "changed vocabulary_loss" not in out
    assert not timed
