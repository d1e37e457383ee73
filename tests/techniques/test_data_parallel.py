"""Replicas: the gradient of the whole batch, one exchange a window, and every rank's share counted as it should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import tiny
from thrice.data.load import load_data
from thrice.runtime.dist import World
from thrice.spec.job import Job
from thrice.verify import verify

pytestmark = pytest.mark.xdist_group("processes")


def verified(world: World, job: Job):
    return verify(job, load_data(job), steps=4, world=world)


@pytest.mark.parametrize("size", [2, 4])
def test_certified(corpus: Path, tmp_path: Path, workers, size: int) -> None:
    job = tiny(corpus, tmp_path / "run", processes=size, micro_batch=6)
    certificates = workers(size).call(verified, job)
    first = certificates[0]
    assert first.ok, first.first_difference
    assert {row.kind for row in first.rows} >= {"replica", "gradient", "update"}
    assert all(certificate == first for certificate in certificates)
