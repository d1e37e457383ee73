"""Every technique that divides work among processes: alone, beside each setting of every other, and in real stacks.

Each certificate is a proof against one process with the whole batch, on distinct data for each rank; dropout is on, and
the epoch's last window is too short to go round.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from test_contract import ALONE, NAMED, is_compiled, named
from thrice.certificate import Certificate
from thrice.compose import claim, compose, refuse
from thrice.data.load import load_data
from thrice.observe.rehearse import rehearse
from thrice.registry import TECHNIQUES
from thrice.runtime.dist import World
from thrice.runtime.technique import Claim, Stage, Technique
from thrice.spec.dump import dump
from thrice.spec.job import Decoder, Job
from thrice.spec.load import load
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import Recompute
from thrice.verify import verify

pytestmark = pytest.mark.xdist_group("processes")

DIVIDING = [
    example
    for technique in TECHNIQUES.values()
    if technique.stage in (Stage.SHARD, Stage.REPLICATE)
    for example in technique.examples()
]
STACKS: list[tuple[Technique, ...]] = [
    (dividing, *others)
    for dividing in DIVIDING
    for others in [(), *((example,) for technique in ALONE for example in technique.examples()), *NAMED.values()]
]


def job_for(corpus: Path, stack: tuple[Technique, ...], **changes: object) -> Job:
    """8 samples a step for two ranks, in micro-batches of 2; an epoch of 283 leaves 3, for one rank and a half."""
    wanted = {
        "data": (str(corpus),), "sequence": 32, "global_batch": 8, "micro_batch": 2, "max_steps": 8, "lr": 1e-3,
        "processes": 2, "decoder": Decoder(layers=2, hidden=32, heads=4, kv_heads=2, dropout=0.1), "techniques": stack,
    }  # fmt: skip
    job = Job(**{**wanted, **changes})
    return job if not any(refuse(job)) else replace(job, micro_batch=4)  # batch norm wants every step in one piece


LEGAL = [stack for stack in STACKS if not any(refuse(job_for(Path("corpus.txt"), stack)))]


def certified(world: World, job: Job, steps: int) -> Certificate:
    return verify(job, load_data(job), steps=steps, world=world)


def test_what_is_refused_is_known() -> None:
    refused = [stack for stack in STACKS if stack not in LEGAL]
    assert all(any(part.name == "optimizer_in_backward" for part in stack) for stack in refused), refused
    assert len(refused) == 2 * len(DIVIDING), "alone, and in the stack for memory"


@pytest.mark.parametrize("stack", LEGAL, ids=named)
def test_stack_keeps_its_claim(stack: tuple[Technique, ...], corpus: Path, workers) -> None:
    job = job_for(corpus, stack, last_window="drop" if is_compiled(stack) else "step")
    certificate, other = workers(2).call(certified, job, 3)
    assert certificate.ok, certificate.first_difference
    assert certificate == other, "every rank has the same certificate"
    assert certificate.claim == max([Claim.ROUNDING, *(part.claim() for part in stack)]).name
    assert certificate.processes == 2
    assert [len(ids) for ids in certificate.samples] == [8, 8, 8 if is_compiled(stack) else 3]


@pytest.mark.parametrize("dividing", DIVIDING, ids=lambda part: named((part,)))
def test_accumulation_under_a_loss_scale_on_four_ranks(dividing: Technique, corpus: Path, workers) -> None:
    stack = (dividing, Precision(mode="fp16", initial_scale=1024.0), Recompute(strategy="full"))
    job = job_for(corpus, stack, processes=4, global_batch=16, micro_batch=1)
    assert job.ledger().grad_accum_steps == 4
    certificate = workers(4).call(certified, job, 3)[0]
    assert certificate.ok, certificate.first_difference


@pytest.mark.parametrize("dividing", DIVIDING, ids=lambda part: named((part,)))
def test_a_rehearsal_names_what_it_leaves_out(dividing: Technique, corpus: Path) -> None:
    """Alone it stands for one rank: the same names, and no process group."""
    job = job_for(corpus, (dividing,))
    session = compose(job, vocabulary=256)
    assert session.replicas is None
    assert claim(job) is max(Claim.ROUNDING, dividing.claim())
    assert rehearse(job, 256).peak_bytes > 0


@pytest.mark.parametrize("dividing", DIVIDING, ids=lambda part: named((part,)))
def test_stack_survives_the_file(dividing: Technique, corpus: Path, tmp_path: Path) -> None:
    job = job_for(corpus, (dividing,))
    (tmp_path / "job.toml").write_text(dump(job), encoding="utf-8")
    assert load(tmp_path / "job.toml", techniques=TECHNIQUES) == job
