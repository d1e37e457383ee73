"""A rehearsal is the run it stands for, at the cost of two micro-batches."""

from __future__ import annotations

import pytest
import torch

from thrice.compose import compose
from thrice.observe.rehearse import rehearse
from thrice.observe.trace import CATEGORIES, Tracer
from thrice.spec.job import Decoder, Job, Optimizer
from thrice.step import train_step


def job(**changes: object) -> Job:
    wanted = {"sequence": 32, "micro_batch": 2, "max_steps": 2, "decoder": Decoder(layers=1, hidden=32, heads=1)}
    return Job(**{**wanted, **changes})


@pytest.mark.parametrize("grad_accum_steps", [1, 2, 5])
def test_two_micro_batches_stand_for_all(grad_accum_steps: int) -> None:
    asked = job(grad_accum_steps=grad_accum_steps)
    session = compose(asked, vocabulary=256)
    window = [session.example() for _ in range(grad_accum_steps)]
    train_step(session, window)
    with Tracer(session.model, session.optimizer) as tracer:
        train_step(session, window)
    real, rehearsal = tracer.trace(), rehearse(asked, 256)
    assert rehearsal.flops == real.flops
    assert rehearsal.at_peak == real.at_peak
    assert rehearsal.peak_bytes == real.peak_bytes
    assert tuple(rehearsal.at_peak) == CATEGORIES
    assert rehearsal.parameters == sum(p.numel() for p in session.model.parameters())


def test_random_state_and_values_are_left_alone() -> None:
    state = torch.get_rng_state()
    rehearse(job(decoder=Decoder(layers=1, hidden=32, heads=1, dropout=0.1)), 256)
    assert torch.equal(torch.get_rng_state(), state)


def test_billions_of_parameters_are_rehearsed_in_no_memory() -> None:
    """A model that no test machine could hold; what its step needs is known all the same."""
    large = Decoder(layers=2, hidden=16384, heads=128, kv_heads=8, mlp_hidden=53248, tied=False)
    rehearsal = rehearse(job(decoder=large, sequence=4096, micro_batch=1), 128_000)
    assert rehearsal.parameters > 8e9
    # AdamW in float32: the parameter, its gradient and two moments
    assert rehearsal.trace.at_end["parameters"] == 4 * rehearsal.parameters
    assert rehearsal.trace.at_end["optimizer_states"] >= 8 * rehearsal.parameters
    assert rehearsal.peak_bytes > 16 * rehearsal.parameters


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimizer_states_are_counted(name: str) -> None:
    rehearsal = rehearse(job(optimizer=Optimizer(name=name)), 256)
    tensors = 11
    per_parameter = {"adamw": 8, "sgd": 4}[name]
    steps = {"adamw": 4 * tensors, "sgd": 0}[name]
    assert rehearsal.trace.at_end["optimizer_states"] == per_parameter * rehearsal.parameters + steps
