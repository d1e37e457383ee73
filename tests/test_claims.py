"""The benchmark of headline figures, on sizes at which its formulas can be checked in seconds."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

from thrice.observe.trace import ACTIVATIONS, GRADIENTS, INPUTS
from thrice.spec.job import Decoder, Job

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SPEC = Decoder(layers=1, hidden=32, heads=2, mlp_hidden=64, vocabulary=300)
TINY = Job(sequence=64, micro_batch=16, max_steps=4, lr=1e-4, decoder=SPEC)


@pytest.fixture(scope="module")
def claims() -> Iterator[ModuleType]:
    """The benchmark imports its neighbours by name, as a script does."""
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("claims", BENCHMARKS / "claims.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["claims"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    for name in {"claims", "attention", "stack", "machine"} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.mark.parametrize("changes", [{"layers": 2}, {"hidden": 48, "heads": 4, "mlp_hidden": 160}])
def test_activation_formula_is_what_a_rehearsal_finds(claims: ModuleType, changes: dict[str, int]) -> None:
    job = replace(TINY, decoder=replace(SPEC, **changes))
    found = claims.rehearsed(job).at_peak[ACTIVATIONS]
    # scalars, and what depends on no batch, are left out of the formula
    assert found == pytest.approx(claims.activation_bytes(job), rel=2e-3)


def test_two_billion_on_a_tiny_model(claims: ModuleType) -> None:
    (found,) = claims.two_billion(TINY)
    told = 4 * SPEC.layers * 16 * 64 * SPEC.hidden
    ratio = claims.rehearsed(TINY).at_peak[ACTIVATIONS] / told
    assert ratio > 10
    assert f"{ratio:.0f} times one tensor" in found.verdict
    peaks = [figures["peak"] for figures in found.measured.values() if isinstance(figures, dict)]
    assert len(peaks) == 4
    assert peaks[0] == max(peaks)


def test_recomputed_flops_are_the_blocks_less_their_last_product(claims: ModuleType) -> None:
    job = replace(TINY, micro_batch=2)
    (found,) = claims.checkpointing(job, job, pairs=1)
    tokens, hidden, mlp = 2 * 64, SPEC.hidden, 64
    attention = 4 * tokens * 64 * hidden
    again = SPEC.layers * (2 * tokens * (4 * hidden**2 + 2 * hidden * mlp) + attention)
    flops = claims.rehearsed(job).flops
    assert found.measured["FLOPs over none"]["full"] == pytest.approx(1 + again / flops, abs=1e-4)  # its digits
    assert found.measured["FLOPs over none"]["full"] > found.measured["FLOPs over none"]["attention_only"] > 1
    for ratio in found.measured["time over none"].values():
        assert 0 < ratio["least"] <= ratio["median"] <= ratio["most"]


def test_the_deepest_model_is_the_last_that_fits(claims: ModuleType) -> None:
    peak = claims.rehearsed(claims.deep(TINY, 4)).peak_bytes
    assert claims.deepest(TINY, peak) == 4
    assert claims.deepest(TINY, peak - 1) == 3
    assert claims.deepest(TINY, 0) == 0


def test_a_cut_window_holds_one_gradient_more(claims: ModuleType) -> None:
    job = replace(TINY, micro_batch=4, grad_accum_steps=4)
    (found,) = claims.accumulation(job)
    cut, alone = claims.rehearsed(job), claims.rehearsed(replace(job, grad_accum_steps=1))
    gradients, losses = 4 * cut.parameters, 3 * 4
    further_inputs = cut.at_peak[INPUTS] - alone.at_peak[INPUTS]
    assert alone.at_peak[GRADIENTS] == 0
    assert cut.peak_bytes - alone.peak_bytes == gradients + further_inputs + losses
    assert found.measured["peak, MB"] == found.measured["rehearsed, MB"]
    # float32 rounding of sums of 1,024 terms; a wrong scale would be of order 1
    assert 0 < found.measured["gradient from the uncut batch's, relative"] < 1e-5


def test_optimizer_bytes(claims: ModuleType) -> None:
    # the step counters of fp32, and norms that 8 bits leave as they are, come on top
    wide = Decoder(layers=1, hidden=128, heads=2, mlp_hidden=256, vocabulary=300)
    states, in_backward = claims.optimizer_memory(replace(TINY, micro_batch=1, decoder=wide), TINY)
    found = states.measured["bytes a parameter"]
    assert found["fp32"] == pytest.approx(8, rel=1e-2)
    assert found["bf16"] == pytest.approx(4, rel=1e-2)
    assert found["8bit"] == pytest.approx(2 * (1 + 4 / 256), rel=3e-2)
    most = in_backward.measured["gradients at the most, GB"]
    assert most["in backward"] <= most["after backward"]


def test_findings_are_shown_and_saved(claims: ModuleType) -> None:
    findings = [*claims.not_measured(), *claims.precision_memory(replace(TINY, micro_batch=1))]
    assert [bool(found.measured) for found in findings] == [False, False, True]
    assert claims.table(findings).row_count == 3
    assert json.loads(json.dumps([asdict(found) for found in findings]))[2]["claim"].startswith("mixed precision")


def test_rehearsal_and_real_tensors_count_the_same(claims: ModuleType) -> None:
    (found,) = claims.rehearsal_against_real(TINY)
    assert found.measured["FLOPs equal"]
    # the scratch memory of kernels is all that may lie between
    assert found.measured["rehearsed, MB"] == pytest.approx(found.measured["real tensors, MB"], rel=1e-2)


def test_speed_is_a_ratio_taken_in_turn(claims: ModuleType) -> None:
    (found,) = claims.precision_speed(replace(TINY, micro_batch=1), pairs=1)
    assert set(found.measured["time over fp32"]) == {"bf16", "bf16-pure"}
    assert ("cannot be shown here" in found.verdict) is not found.measured["bf16 instructions"]


def test_blockwise_grows_slower_than_the_matrix(claims: ModuleType) -> None:
    (found,) = claims.blockwise((512, 2048))
    grown = found.measured["2048 over 512 tokens"]
    assert grown["eager"]["bytes"] == pytest.approx(16, rel=0.1)
    assert grown["flash"]["bytes"] <= 4
