"""Every technique alone and every legal pair: the claim holds, names stay, the rehearsal equals the run.

A technique enters by its line in the registry; its `examples` are what is taken here. Those that divide work among
processes are taken through it in test_contract_processes.py.
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
from thrice.runtime.technique import Claim, Stage, Technique
from thrice.spec.dump import dump
from thrice.spec.job import Decoder, Job, Optimizer
from thrice.spec.load import load
from thrice.step import train_step
from thrice.techniques.attention import Attention
from thrice.techniques.compile import Compile
from thrice.techniques.optimizer_in_backward import OptimizerInBackward
from thrice.techniques.optimizer_states import OptimizerStates
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import Recompute
from thrice.techniques.vocabulary_loss import VocabularyLoss
from thrice.verify import verify

ALONE = [technique for technique in TECHNIQUES.values() if technique.stage not in (Stage.SHARD, Stage.REPLICATE)]
SINGLES = [(example,) for technique in ALONE for example in technique.examples()]


def covering(one: type[Technique], other: type[Technique]) -> list[tuple[Technique, ...]]:
    """Each setting of the one beside some setting of the other, and the other way round."""
    ones, others = list(one.examples()), list(other.examples())
    if {one.name, other.name} == {"precision", "recompute"}:  # the two that reach deepest into each other
        return list(product(ones, others))
    return [(ones[i % len(ones)], others[i % len(others)]) for i in range(max(len(ones), len(others)))]


PAIRS = [pair for one, other in combinations(ALONE, 2) for pair in covering(one, other)]

NAMED = {
    "memory": (
        Precision(mode="bf16"), Recompute(strategy="full"), VocabularyLoss(mode="chunked"),
        OptimizerStates(format="8bit"), OptimizerInBackward(enabled=True),
    ),
    "pure": (
        Precision(mode="bf16-pure", rounding="stochastic"), Recompute(strategy="selective"),
        Attention(kernel="flash"), OptimizerStates(format="bf16"),
    ),
    "fp16": (
        Precision(mode="fp16", initial_scale=1024.0), Recompute(strategy="attention_only"),
        Attention(kernel="sdpa"), VocabularyLoss(mode="chunked"),
    ),
    "long": (
        Recompute(strategy="budget", budget_bytes=1 << 20), Attention(kernel="flash"), VocabularyLoss(mode="chunked"),
    ),
    "fast": (
        Precision(mode="bf16"), Attention(kernel="sdpa"), VocabularyLoss(mode="whole"), Compile(mode="blocks"),
    ),
}  # fmt: skip
"""Stacks that somebody would train with."""


def job_for(corpus: Path, stack: tuple[Technique, ...], **changes: object) -> Job:
    """A job on which the stack is legal: with accumulation and clipping, unless it refuses either."""
    # 286 samples, less those held out, leave a last window of 3 after windows of 4, in micro-batches of 2
    wanted = {
        "data": (str(corpus),), "sequence": 32, "global_batch": 4, "micro_batch": 2, "max_steps": 8, "lr": 1e-3,
        "decoder": Decoder(layers=2, hidden=32, heads=4, kv_heads=2, dropout=0.1), "techniques": stack,
    }  # fmt: skip
    job = Job(**{**wanted, **changes})
    for otherwise in ({}, {"micro_batch": 4}, {"micro_batch": 4, "optimizer": Optimizer(clip=None)}):
        legal = replace(job, **otherwise)
        if not list(refuse(legal)):
            return legal
    return job


def named(stack: tuple[Technique, ...]) -> str:
    return "+".join("-".join([part.name, *(str(v) for v in vars(part).values() if v is not None)]) for part in stack)


def is_compiled(stack: tuple[Technique, ...]) -> bool:
    """What a compiled block allocates is the compiler's, and no operator shows it: it is rehearsed uncompiled."""
    return any(isinstance(part, Compile) for part in stack)


REFUSED = [pair for pair in PAIRS if any(refuse(job_for(Path("corpus.txt"), pair)))]
STACKS = [stack for stack in SINGLES + PAIRS + list(NAMED.values()) if stack not in REFUSED]


def test_what_is_refused_is_known() -> None:
    """A refusal that comes about by accident would take its pair out of every other test here."""
    assert sorted(map(named, REFUSED)) == ["precision-fp16-1024.0+optimizer_in_backward-True"]


COMPILER_WARNS = pytest.mark.filterwarnings("ignore")
"""torch's compiler is not free of warnings of its own."""


@pytest.mark.parametrize(
    "stack",
    [pytest.param(stack, marks=COMPILER_WARNS) if is_compiled(stack) else stack for stack in STACKS],
    ids=[named(stack) for stack in STACKS],
)
def test_stack_keeps_its_claim(stack: tuple[Technique, ...], corpus: Path) -> None:
    # each shape is compiled anew, so compiled stacks see one; the shorter last window is the others'
    last_window = "drop" if is_compiled(stack) else "step"
    job = job_for(corpus, stack, last_window=last_window)
    assert not list(refuse(job))
    certificate = verify(job, load_data(job), steps=3)
    assert certificate.ok, certificate.first_difference
    cut = Claim.ROUNDING if job.ledger().grad_accum_steps > 1 else Claim.BITWISE
    assert certificate.claim == max([cut, *(part.claim() for part in stack)]).name
    shapes = [len(ids) for ids in certificate.samples]
    assert shapes == [4, 4, 4 if is_compiled(stack) else 3], "the epoch's last, shorter window is verified"


@pytest.mark.parametrize("stack", [stack for stack in STACKS if not is_compiled(stack)], ids=named)
def test_stack_is_rehearsed_to_the_byte(stack: tuple[Technique, ...], corpus: Path) -> None:
    # an uncut window: a fake operator costs as much as a large real one
    job = job_for(corpus, stack, micro_batch=4)
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
