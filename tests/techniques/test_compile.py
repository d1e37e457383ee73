"""Compiled blocks: one graph for all of a kind, evaluation eager, a message where nothing can be compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from plain import VOCABULARY, distance, job, window
from thrice.compose import claim, compose
from thrice.runtime.technique import Claim
from thrice.spec.job import Decoder
from thrice.step import evaluate, train_step
from thrice.techniques.compile import Compile

COMPILED = Compile(mode="blocks")


def layers(count: int, *techniques: object):
    return job(
        decoder=Decoder(layers=count, hidden=32, heads=4, kv_heads=2, mlp_hidden=48, dropout=0.1), techniques=techniques
    )


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_one_graph_serves_every_block_and_evaluation_is_eager() -> None:
    compiled = compose(layers(5, COMPILED), vocabulary=VOCABULARY)
    eager = compose(layers(5), vocabulary=VOCABULARY)
    assert "5 blocks" in compiled.applied["compile"]
    torch._dynamo.reset()
    counters.clear()
    for session in (compiled, eager):
        torch.manual_seed(1)
        train_step(session, window(9, 7))
    assert counters["stats"]["unique_graphs"] == 1, "compile time does not grow with depth"
    assert not counters["graph_break"]
    # sums in another order: some float32 roundings, on updates that SGD makes in proportion to the gradient
    assert distance(dict(compiled.model.named_parameters()), dict(eager.model.named_parameters())) < 1e-6
    for length in (3, 5, 9, 11):
        inputs = torch.zeros(1, length, dtype=torch.int64)
        with torch.no_grad():
            torch.testing.assert_close(compiled.model.eval()(inputs), eager.model.eval()(inputs))
    evaluate(compiled, window(5))
    assert counters["stats"]["unique_graphs"] == 1, "every length would be compiled anew"


def test_without_a_compiler_it_says_so_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    session = compose(layers(2, COMPILED), vocabulary=VOCABULARY)
    assert "no C++ compiler 'no-such-compiler' was found" in session.applied["compile"]
    assert "CXX" in session.applied["compile"]
    assert train_step(session, window(9, 7)).taken


@pytest.mark.parametrize(
    ("script", "said"),
    [("exit 1", ": exit code 1; "), ("echo no headers >&2; echo ended >&2; exit 1", ": no headers; ")],
)
def test_with_a_compiler_that_does_not_work_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, said: str
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    session = compose(layers(2, COMPILED), vocabulary=VOCABULARY)
    assert f"the C++ compiler '{compiler}' cannot build a library: " in session.applied["compile"]
    assert said in session.applied["compile"]
    assert "CXX" in session.applied["compile"]
    assert train_step(session, window(9, 7)).taken


def test_off_is_off() -> None:
    session = compose(layers(2, Compile()), vocabulary=VOCABULARY)
    assert session.applied["compile"] == "nothing is compiled"
    assert not any("forward" in vars(module) for module in session.model.modules())


def test_its_claim() -> None:
    uncut = replace(layers(2), micro_batch=4)
    assert claim(uncut) is Claim.BITWISE
    assert claim(replace(uncut, techniques=(COMPILED,))) is Claim.ROUNDING
    assert claim(replace(uncut, techniques=(Compile(),))) is Claim.BITWISE
