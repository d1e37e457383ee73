import itertools

import pytest

from thrice.errors import ConfigError, Problem
from thrice.spec.job import BatchRamp, Job
from thrice.spec.workload import Ledger, Ramp, divide


def cut(
    global_batch: int | None = None,
    micro_batch: int | None = None,
    grad_accum_steps: int | None = None,
    data_parallel: int = 1,
) -> tuple[int, int, int] | Problem:
    return divide(
        global_batch=global_batch,
        micro_batch=micro_batch,
        grad_accum_steps=grad_accum_steps,
        data_parallel=data_parallel,
    )


def refused(**given: int | None) -> Problem:
    problem = cut(**given)
    assert isinstance(problem, Problem)
    return problem


@pytest.mark.parametrize(
    ("micro_batch", "grad_accum_steps", "data_parallel"),
    list(itertools.product((1, 3, 8), (1, 2, 5), (1, 2, 7))),
)
def test_any_three_determine_the_fourth(micro_batch: int, grad_accum_steps: int, data_parallel: int) -> None:
    whole = micro_batch * grad_accum_steps * data_parallel
    expected = (whole, micro_batch, grad_accum_steps)
    assert cut(None, micro_batch, grad_accum_steps, data_parallel) == expected
    assert cut(whole, None, grad_accum_steps, data_parallel) == expected
    assert cut(whole, micro_batch, None, data_parallel) == expected
    assert cut(whole, micro_batch, grad_accum_steps, data_parallel) == expected


def test_one_batch_alone_is_one_micro_batch_a_step() -> None:
    assert cut(global_batch=12, data_parallel=3) == (12, 4, 1)
    assert cut(micro_batch=4, data_parallel=3) == (12, 4, 1)


def test_devices_change_the_accumulation_and_not_the_batch() -> None:
    assert [cut(global_batch=64, micro_batch=8, data_parallel=n) for n in (1, 2, 4, 8)] == [
        (64, 8, 8),
        (64, 8, 4),
        (64, 8, 2),
        (64, 8, 1),
    ]


@pytest.mark.parametrize("grad_accum_steps", [None, 4])
def test_no_batch_at_all_is_refused(grad_accum_steps: int | None) -> None:
    problem = refused(grad_accum_steps=grad_accum_steps)
    assert problem.key == "global_batch"
    assert "no batch is given" in problem.why


def test_a_contradiction_names_every_number() -> None:
    text = str(refused(global_batch=64, micro_batch=8, grad_accum_steps=3, data_parallel=2))
    assert "global_batch = 64" in text
    assert "micro_batch 8 × grad_accum_steps 3 × data_parallel 2 = 48, not 64" in text
    assert "it becomes 4" in text
    assert "global_batch = 48" in text


@pytest.mark.parametrize(
    ("given", "divisor", "nearest"),
    [
        ({"global_batch": 50, "micro_batch": 8, "data_parallel": 2}, "= 16", "48 or 64"),
        ({"global_batch": 50, "micro_batch": 8, "grad_accum_steps": 3}, "= 8", "48 or 56"),
        ({"global_batch": 10, "grad_accum_steps": 4}, "= 4", "8 or 12"),
        ({"global_batch": 3, "micro_batch": 8}, "= 8", ": 8"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_do(
    given: dict[str, int], divisor: str, nearest: str
) -> None:
    problem = refused(**given)
    assert (problem.key, problem.value) == ("global_batch", given["global_batch"])
    assert divisor in problem.why
    assert problem.fix.endswith(nearest)


def test_the_ledger_says_every_term() -> None:
    ledger = Ledger(
        micro_batch=8,
        grad_accum_steps=4,
        data_parallel=2,
        global_batch=64,
        sequence=256,
        lr=3e-4,
        lr_from="as given",
    )
    assert ledger.tokens_per_step == 16_384
    assert str(ledger) == (
        "global_batch 64 = micro_batch 8 × grad_accum_steps 4 × data_parallel 2"
        " · 16,384 tokens per step (256 per sample) · lr 0.0003 (as given)"
    )
    assert ledger.as_dict() == {
        "micro_batch": 8,
        "grad_accum_steps": 4,
        "data_parallel": 2,
        "global_batch": 64,
        "sequence": 256,
        "lr": 3e-4,
        "lr_from": "as given",
        "ramp": None,
        "tokens_per_step": 16_384,
    }


def test_a_ramp_grows_in_equal_parts_over_its_samples() -> None:
    ramp = Ramp(start=32, increment=32, target=128, samples=3000)
    assert [ramp.at(samples) for samples in (0, 999, 1000, 1999, 2000, 2999, 3000, 10**9)] == [
        32, 32, 64, 64, 96, 96, 128, 128,
    ]  # fmt: skip


def test_steps_and_samples_of_a_ramp_agree() -> None:
    ledger = Job(global_batch=64, micro_batch=8, max_steps=1, batch_ramp=BatchRamp(start=16, samples=500)).ledger()
    samples = 0
    for steps in range(1, 60):
        samples += ledger.global_batch_at(samples)
        assert ledger.samples_after(steps) == samples
        assert ledger.steps_for(samples) == steps
        assert ledger.steps_for(samples + 1) == steps + 1


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"batch_ramp": BatchRamp(start=12, samples=9)}, "batch_ramp.start", "data_parallel 1 = 8 samples"),
        ({"batch_ramp": BatchRamp(start=64, samples=9)}, "batch_ramp.start", "up to global_batch = 64"),
        ({"batch_ramp": BatchRamp(start=16, increment=40, samples=9)}, "batch_ramp.start", "steps of 40 samples"),
        ({"lr_scaling": "sqrt"}, "base_global_batch", "lr = 0.0003 was found for"),
        ({"micro_batch": "auto", "grad_accum_steps": 2}, "micro_batch", "grad_accum_steps follows"),
        ({"micro_batch": "auto", "global_batch": None}, "micro_batch", "global_batch stays what it is"),
    ],
)
def test_what_contradicts_is_said_with_its_numbers(changes: dict[str, object], key: str, words: str) -> None:
    job = Job(**{"global_batch": 64, "micro_batch": 8, "max_steps": 1, **changes})
    problems = list(job.check())
    assert key in [problem.key for problem in problems]
    assert any(words in problem.why for problem in problems), problems


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"micro_batch": 4, "batch_ramp": BatchRamp(start=3, samples=8)}, "batch_ramp.start = 4, or micro_batch = 1 "),
        ({"micro_batch": 4, "batch_ramp": BatchRamp(start=4, increment=2, samples=8)}, "increment = 4, or micro_batch"),
        ({"batch_ramp": BatchRamp(start=4, samples=8)}, "micro_batch = 4 "),  # one micro-batch: none is smaller
        ({"micro_batch": 4, "batch_ramp": BatchRamp(start=8, samples=8)}, "global_batch = 16"),
    ],
)
def test_a_ramp_that_does_not_fit_has_one_remedy_and_not_a_circle(changes: dict[str, object], fix: str) -> None:
    (problem,) = Job(**{"global_batch": 8, "max_steps": 1, **changes}).check()
    assert fix in problem.fix
    assert problem.fix.startswith((fix, "batch_ramp.increment"))


@pytest.mark.parametrize(
    ("changes", "peak"),
    [
        ({"lr": 1e300}, "1e+300"),
        ({"lr": 1e38, "lr_scaling": "linear", "base_global_batch": 1}, "6.4e+39 by linear lr_scaling"),
        ({"lr": 1e308, "lr_scaling": "linear", "base_global_batch": 1}, "inf"),
        ({"lr": 5e-324, "lr_scaling": "sqrt", "base_global_batch": 10**6}, "is 0 by sqrt"),
    ],
)
def test_a_peak_that_no_weight_can_move_by_is_refused(changes: dict[str, object], peak: str) -> None:
    (problem,) = Job(**{"global_batch": 64, "max_steps": 1, **changes}).check()
    assert (problem.key, problem.value) == ("lr", changes["lr"])
    assert peak in problem.why


def test_max_tokens_counts_the_samples_of_a_ramp() -> None:
    ramp = BatchRamp(start=16, samples=10**6)
    job = Job(global_batch=64, micro_batch=8, sequence=10, max_tokens=16 * 10 * 31 + 1, batch_ramp=ramp)
    assert job.steps() == 32


def test_an_open_micro_batch_has_no_ledger_yet() -> None:
    with pytest.raises(ConfigError, match="still open"):
        Job(global_batch=64, micro_batch="auto", max_steps=1).ledger()
