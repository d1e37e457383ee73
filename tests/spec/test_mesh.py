"""The mesh: every rank has one place, groups are what they say, and what does not divide is refused in numbers."""

from __future__ import annotations

from itertools import product

import pytest

from thrice.errors import Problem
from thrice.spec.mesh import AXES, Mesh, mesh_of

SHAPES = list(product((1, 2, 3), repeat=4))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rank_has_a_place_of_its_own(shape: tuple[int, ...]) -> None:
    mesh = Mesh(**dict(zip(AXES, shape, strict=True)))
    places = [mesh.coordinates(rank) for rank in range(mesh.processes)]
    assert len({tuple(place.items()) for place in places}) == mesh.processes
    assert [mesh.rank(**place) for place in places] == list(range(mesh.processes))
    for axis in AXES:
        for rank in range(mesh.processes):
            group = mesh.group(axis, rank)
            assert group[places[rank][axis]] == rank
            assert len(group) == getattr(mesh, axis)
            assert all(mesh.group(axis, other) == group for other in group)


def test_neighbours_are_of_one_tensor_group_and_stages_are_furthest_apart() -> None:
    mesh = Mesh(data_parallel=2, tensor_parallel=2, pipeline_parallel=2)
    assert mesh.group("tensor_parallel", 0) == [0, 1]
    assert mesh.group("data_parallel", 0) == [0, 2]
    assert mesh.group("pipeline_parallel", 0) == [0, 4]
    assert str(mesh) == "pipeline_parallel 2 × data_parallel 2 × tensor_parallel 2"
    with pytest.raises(IndexError, match="rank 8 of 8"):
        mesh.coordinates(8)


def test_data_parallel_is_what_is_left() -> None:
    assert mesh_of(8, tensor_parallel=2) == Mesh(data_parallel=4, tensor_parallel=2)
    assert mesh_of(8, tensor_parallel=2, data_parallel=4) == Mesh(data_parallel=4, tensor_parallel=2)


def test_degrees_that_do_not_divide_are_refused_with_what_would() -> None:
    problem = mesh_of(6, tensor_parallel=4)
    assert isinstance(problem, Problem)
    assert (problem.key, problem.value) == ("processes", 6)
    assert "= 4 does not divide it" in problem.why
    assert problem.fix == "processes = 8 or 4"
    problem = mesh_of(8, tensor_parallel=2, data_parallel=2)
    assert isinstance(problem, Problem)
    assert problem.key == "data_parallel"
    assert "leave 4 for it" in problem.why
    assert problem.fix == 'data_parallel = "auto", or processes = 4'
