"""What a comparison is asked for: variants, each loaded and checked, everything wrong said before anything runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from thrice.errors import ConfigError, DataError, UsageError
from thrice.experiment import Experiment, Variant, expand
from thrice.job_file import load_job
from thrice.spec.job import Optimizer
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import Recompute

EXAMPLES = Path(__file__).parents[1] / "examples/experiments"


def file(folder: Path, text: str, name: str = "job.toml") -> Path:
    path = folder / name
    path.write_text("global_batch = 8\nmax_steps = 4\n" + text)
    return path


def labels(experiment: Experiment) -> list[str]:
    return [variant.label for variant in experiment.variants]


def test_several_form_the_product(tmp_path: Path) -> None:
    source = file(tmp_path, "lr = 0.5")
    experiment = expand(source, [("seed", "7")], vary=["precision=fp32, bf16", "optimizer.clip=1.0,none"])
    assert labels(experiment) == [
        "precision=fp32 · optimizer.clip=1.0",
        "precision=fp32 · optimizer.clip=none",
        "precision=bf16 · optimizer.clip=1.0",
        "precision=bf16 · optimizer.clip=none",
    ]
    assert experiment.variants[3].job == replace(
        load_job(source),
        seed=7,
        run_dir=None,
        optimizer=Optimizer(clip=None),
        techniques=(Precision(mode="bf16"),),
    )
    assert (experiment.name, experiment.out, experiment.seeds) == ("job", Path("runs/compare-job"), 1)
    assert experiment.over == "steps"


def test_runs_have_seeds_and_folders_of_their_own(tmp_path: Path) -> None:
    source = file(tmp_path, f'run_dir = "{tmp_path}/mine"\n[compare]\nseeds = 2\nvary = ["recompute=none,full"]')
    experiment = expand(source, [("seed", "5")])
    runs = list(experiment.runs())
    assert [(variant.label, job.seed) for variant, job, _ in runs] == [
        ("recompute=none", 5), ("recompute=full", 5), ("recompute=none", 6), ("recompute=full", 6)
    ]  # fmt: skip
    assert [job.run_dir for _, job, _ in runs[1:3]] == [
        f"{tmp_path}/compare-job/recompute=full-seed5",
        f"{tmp_path}/compare-job/recompute=none-seed6",
    ]
    assert len({job_file for _, _, job_file in runs}) == 4
    # the table of the experiment is no technique of the run
    assert runs[1][1].techniques == (Recompute(strategy="full"),)


def test_flags_go_before_the_table(tmp_path: Path) -> None:
    source = file(tmp_path, '[compare]\nseeds = 2\nvary = ["recompute=none,full"]')
    experiment = expand(source, [("compare.seeds", "3")], vary=["lr=1e-3,1e-4"], out=tmp_path / "out")
    assert (labels(experiment), experiment.seeds) == (["lr=1e-3", "lr=1e-4"], 3)
    assert experiment.out == tmp_path / "out"


def test_yaml_and_the_quickstart(tmp_path: Path) -> None:
    source = tmp_path / "job.yaml"
    source.write_text("global_batch: 8\nmax_steps: 4\ncompare:\n  vary: lr=1e-3,1e-4\n")
    assert labels(expand(source)) == ["lr=1e-3", "lr=1e-4"]
    assert expand(None, vary=["lr=1e-3,1e-4"]).out == Path("runs/compare-quickstart")


def test_names_of_folders_are_safe_and_different(tmp_path: Path) -> None:
    job = load_job(file(tmp_path, ""))
    values = ["/a/b c.txt", "/a/b_c.txt", "/a/b/c.txt", "x" * 300]
    folders = [Variant(label=f"data={value}", job=job).folder for value in values]
    assert len(set(folders)) == 4
    for folder in folders:
        assert "/" not in folder
        assert " " not in folder
        assert len(folder) < 120


def test_where_steps_are_not_alike_tokens_are(tmp_path: Path) -> None:
    source = file(tmp_path, "")
    assert expand(source, vary=["grad_accum_steps=1,2"]).over == "steps", "the same global batch in more pieces"
    assert expand(source, vary=["global_batch=8,16"]).over == "tokens"
    assert expand(source, vary=["max_steps=4,8"]).over == "tokens"
    assert expand(source, vary=["sequence=64,128"]).over == "tokens"
    assert expand(source, vary=["micro_batch=auto,2"]).over == "steps"


@pytest.mark.parametrize(
    ("vary", "overrides", "said"),
    [
        ([], [], "nothing is varied"),
        (["lr"], [], "a field and its values were expected"),
        (["=1,2"], [], "a field and its values were expected"),
        (["lr=1e-3"], [], "one value is no variation\n    → --lr 1e-3 sets it for every run"),
        (["lr=1e-3,"], [], "there is nothing between two commas or at an end"),
        (["lr="], [], "there is nothing between two commas"),
        (["lr=1e-3,1e-4,1e-3"], [], "lr = '1e-3': it is given 2 times"),
        (["lr=1e-3,0.001"], [], "lr=0.001: it is the same job as lr=1e-3"),
        (["precison=fp32,bf16"], [], "precison: there is no such key\n    → precision"),
        (["learning_rate=1,2"], [], "other frameworks' learning_rate is lr here"),
        (["precision=fp32,fp99"], [], "precision = 'fp99': it must be one of"),
        (["seed=1,2"], [], "--seeds 3 takes three of them"),
        (["run_dir=a,b"], [], "each run has a folder of its own"),
        (["compare.seeds=1,2"], [], "it cannot be varied"),
        (["lr=1,2", "lr=3,4"], [], "it is varied already"),
        (["precision=fp32,bf16", "precision.mode=fp16,bf16"], [], "it is varied already"),
        (["grad-accum-steps=1,2"], [("grad_accum_steps", "4")], "it is varied, and set to '4' for all"),
        (["precision.mode=fp32,bf16"], [("precision", "fp16")], "it is varied, and set to 'fp16' for all"),
        (["lr=1,2"], [("compare.seeds", "0")], "compare.seeds = 0: it must be at least 1"),
        (["lr=1,2"], [("compare.seeds", "two")], "compare.seeds = 'two': it must be a whole number"),
        (["lr=1,2"], [("run_dir", "x")], "each run has a folder of its own"),
        (["lr=1,2"], [("foo", "1")], "foo = '1': there is no such key"),
    ],
)  # fmt: skip
def test_what_is_wrong(vary: list[str], overrides: list[tuple[str, str]], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        expand(file(tmp_path, ""), overrides, vary=vary)
    assert said in str(caught.value)


def test_a_table_that_is_wrong(tmp_path: Path) -> None:
    for text, said in (
        ("[compare]\nvary = [3]", "value 1: it is a number and must be text"),
        ("[compare]\nseeds = 2", "nothing is varied"),
        ('[compare]\nvary = ["lr=1,2"]\nseed = 2', "compare.seed = 2: there is no such key"),
        ('[compare]\nvary = ["lr=1,2"]\nseeds = 1.5', "compare.seeds = 1.5: it is a number and must be a whole"),
    ):
        with pytest.raises(UsageError) as caught:
            expand(file(tmp_path, text))
        assert said in str(caught.value)


def test_all_problems_at_once_naming_the_combination(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(
            file(tmp_path, ""),
            [("optimizer.implementation", "fused")],
            vary=["micro_batch=3,4", "precision=fp32,bf16-pure"],
        )
    said = str(caught.value)
    assert said.startswith("2 problems in ")
    assert "micro_batch=3 · precision=fp32 (and 1 more): global_batch = 8: it does not divide by micro_batch 3" in said
    assert "micro_batch=4 · precision=bf16-pure: optimizer.implementation = 'fused'" in said


@pytest.mark.parametrize(
    ("vary", "overrides", "label", "said"),
    [
        ("optimizer_states=fp32,8bit", [], "optimizer_states=8bit",
         "8 bits are for matrices of at least 4,096 elements"),
        ("decoder.vocabulary=100,256", [], "decoder.vocabulary=100", 'the tokenizer "byte" has 256 tokens'),
        ("recompute.budget_bytes=10,1GiB", [("recompute.strategy", "budget")], "recompute.budget_bytes=10",
         "the blocks hold at least"),
    ],
)  # fmt: skip
def test_what_shows_only_on_the_model_is_refused_before_anything_runs(
    vary: str, overrides: list[tuple[str, str]], label: str, said: str, tmp_path: Path
) -> None:
    source = file(tmp_path, "sequence = 32\n[decoder]\nlayers = 1\nhidden = 8\nheads = 1")
    with pytest.raises(ConfigError) as caught:
        expand(source, overrides, vary=[vary])
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"{label}: ")
    assert said in str(problem)


def test_what_shows_only_on_the_model_can_be_left_out(tmp_path: Path) -> None:
    experiment = expand(file(tmp_path, ""), vary=["decoder.vocabulary=100,256,300"], skip_refused=True)
    assert labels(experiment) == ["decoder.vocabulary=256", "decoder.vocabulary=300"]
    assert experiment.refused == (
        ("decoder.vocabulary=100", 'decoder.vocabulary = 100: the tokenizer "byte" has 256 tokens'),
    )


def test_data_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"missing\.txt"):
        expand(file(tmp_path, ""), vary=[f"data={tmp_path}/a.txt,{tmp_path}/missing.txt"])


def test_what_is_wrong_everywhere_is_said_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(file(tmp_path, "sequence = 0"), vary=["lr=1,2"], skip_refused=True)
    assert [str(problem) for problem in caught.value.problems] == ["sequence = 0: it must be at least 1"]


def test_refused_combinations_can_be_left_out(tmp_path: Path) -> None:
    experiment = expand(file(tmp_path, ""), vary=["micro_batch=3,4,8"], skip_refused=True)
    assert labels(experiment) == ["micro_batch=4", "micro_batch=8"]
    ((label, reason),) = experiment.refused
    assert (label, reason.startswith("global_batch = 8: it does not divide by micro_batch 3")) == (
        "micro_batch=3",
        True,
    )
    with pytest.raises(UsageError, match="1 of 3 variants can run, and nothing is left to compare\n  micro_batch=3: "):
        expand(file(tmp_path, ""), vary=["micro_batch=3,5,8"], skip_refused=True)


def test_train_points_to_compare(tmp_path: Path) -> None:
    source = file(tmp_path, '[compare]\nvary = ["lr=1,2"]')
    with pytest.raises(ConfigError, match=r"experiment of several runs.*\n.*thrice compare FILE runs it"):
        load_job(source)
    with pytest.raises(ConfigError, match=r"compare\.seeds = '3': it describes an experiment"):
        load_job(None, [("compare.seeds", "3")])
    for flag in ("vary", "seeds", "out"):
        with pytest.raises(ConfigError, match=f"{flag} = '3': there is no such key\n.*thrice compare"):
            load_job(None, [(flag, "3")])


@pytest.mark.parametrize(
    ("name", "variants", "seeds", "over"),
    [
        ("recompute", 6, 1, "steps"),
        ("precision_accumulation", 9, 1, "steps"),
        ("batch_scaling", 9, 1, "tokens"),
        ("precision_control", 3, 3, "steps"),
    ],
)
def test_the_examples(name: str, variants: int, seeds: int, over: str) -> None:
    experiment = expand(EXAMPLES / f"{name}.toml")
    assert (len(experiment.variants), experiment.seeds, experiment.over) == (variants, seeds, over)
    assert experiment.refused == ()
    trained_on = {variant.job.steps() * variant.job.ledger().tokens_per_step for variant in experiment.variants}
    assert len(trained_on) == 1, "the same number of tokens for every variant"


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == {
        "recompute", "precision_accumulation", "batch_scaling", "precision_control"
    }  # fmt: skip
