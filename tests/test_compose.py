"""What compose makes of a model of the caller's."""

from __future__ import annotations

import copy

import pytest
from torch import nn

from plain import job, session, window
from thrice.errors import ConfigError
from thrice.step import train_step
from thrice.techniques.attention import Attention

FLASH = Attention(kernel="flash")


def test_a_model_with_techniques_in_it_is_refused_and_so_is_its_copy() -> None:
    model = session(job(techniques=(FLASH,))).model
    for again in (model, copy.deepcopy(model)):
        with pytest.raises(ConfigError, match=r"it was composed before, with attention, whose.*\n.*load_state_dict"):
            session(job(), model=again)
    with pytest.raises(ConfigError, match="its part 0 was composed before"):
        session(job(), model=nn.Sequential(model))


def test_a_model_that_no_technique_changed_is_composed_again() -> None:
    model = session(job()).model
    assert train_step(session(job(techniques=(FLASH,)), model=model), window(9)).taken


def test_a_model_that_returns_a_tuple_is_told_so() -> None:
    class Tuple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = session(job()).model

        def forward(self, inputs):
            return self.inner(inputs), None

    with pytest.raises(ConfigError, match="model: it returns a tuple"):
        train_step(session(job(), model=Tuple()), window(9))
