"""Every technique alone and every legal pair: the claim holds, names stay, the rehearsal equals the run.

A technique enters by its line in the registry; its `examples` are what is taken here.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
import torch

from thrice.compose import claim, compose, refuse
from thrice.data.load import load_data
from thrice.observe.rehearse import rehearse
from thrice.observe.trace import Tracer
from thrice.registry import TECHNIQUES
from thrice.runtime.technique import Claim, Technique
from thrice.spec.dump import dump
from thrice.spec.job import Decoder, Job
from thrice.spec.load import load
from thrice.step import train_step
from thrice.verify import verify

SINGLES = [(example,) for technique in TECHNIQUES.values() for example in technique.examples()]
PAIRS = [
    pair for one, other in combinations(TECHNIQUES.values(), 2) for pair in product(one.examples(), other.examples())
]
STACKS = SINGLES + PAIRS


def job_for(corpus: Path, stack: tuple[Technique, ...], **changes: object) -> Job:
    # 286 samples, less 5 held out, leave a last window of 3 after windows of 4, in micro-batches of 2
    wanted = {
        "data": (str(corpus),), "sequence": 32, "global_batch": 4, "micro_batch": 2, "max_steps": 8, "lr": 1e-3,
        "decoder": Decoder(layers=3, hidden=32, heads=4, kv_heads=2, dropout=0.1), "techniques": stack,
    }  # fmt: skip
    return Job(**{**wanted, **changes})


def named(stack: tuple[Technique, ...]) -> str:
    return "+".join("-".join(str(v) for v in vars(part).values() if v is not None) for part in stack)


@pytest.mark.parametrize("stack", STACKS, ids=named)
def test_stack_keeps_its_claim(stack: tuple[Technique, ...], corpus: Path) -> None:
    job = job_for(corpus, stack)
    assert not list(refuse(job))
    certificate = verify(job, load_data(job), steps=3)
    assert certificate.ok, certificate.first_difference
    assert certificate.claim == max([Claim.ROUNDING, *(part.claim() for part in stack)]).name
    assert [len(ids) for ids in certificate.samples] == [4, 4, 3], "the epoch's last, shorter window is verified"


@pytest.mark.parametrize("stack", STACKS, ids=named)
def test_stack_is_rehearsed_to_the_byte(stack: tuple[Technique, ...], corpus: Path) -> None:
    # two blocks and an uncut window: a fake operator costs as much as a large real one
    job = job_for(corpus, stack, micro_batch=4, decoder=Decoder(layers=2, hidden=32, heads=4, dropout=0.1))
    plain = compose(replace(job, techniques=()), vocabulary=256)
    session = compose(job, vocabulary=256)
    names = [name for name, _ in session.model.named_parameters()]
    assert names == [name for name, _ in plain.model.named_parameters()]
    window = [session.example() for _ in range(session.ledger.grad_accum_steps)]
    train_step(session, window)
    with Tracer(session.model, session.optimizer) as tracer:
        train_step(session, window)
    measured, rehearsed = tracer.trace(), rehearse(job, 256, tracer.workspaces).trace
    assert rehearsed.flops_by_phase == measured.flops_by_phase
    assert rehearsed.peak_bytes == measured.peak_bytes
    assert rehearsed.at_end == measured.at_end


@pytest.mark.parametrize("stack", [one for one in SINGLES if one[0].claim() is Claim.BITWISE], ids=named)
def test_bitwise_claims_are_bitwise_on_an_uncut_window(stack: tuple[Technique, ...], corpus: Path) -> None:
    job = job_for(corpus, stack, micro_batch=4)
    assert claim(job) is Claim.BITWISE
    certificate = verify(job, load_data(job), steps=3)
    assert certificate.ok, certificate.first_difference
    assert all(row.allowed == 0 for row in certificate.rows)


@pytest.mark.parametrize("stack", STACKS, ids=named)
def test_stack_survives_the_file(stack: tuple[Technique, ...], corpus: Path, tmp_path: Path) -> None:
    job = job_for(corpus, stack)
    (tmp_path / "job.toml").write_text(dump(job), encoding="utf-8")
    assert load(tmp_path / "job.toml", techniques=TECHNIQUES) == job


def test_two_of_one_slot_are_refused(corpus: Path) -> None:
    first = SINGLES[0][0]
    problems = list(refuse(job_for(corpus, (first, first))))
    assert [problem.key for problem in problems] == [first.name]
    assert str(first.slot) in problems[0].why


def test_stages_decide_the_order_of_application(corpus: Path) -> None:
    applied = [list(compose(job_for(corpus, stack), vocabulary=256).applied) for stack in PAIRS[:3]]
    backwards = [list(compose(job_for(corpus, stack[::-1]), vocabulary=256).applied) for stack in PAIRS[:3]]
    assert applied == backwards
    assert torch.is_grad_enabled()
