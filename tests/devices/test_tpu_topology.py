"""The choice of cores: neighbours next to each other, on any slice."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.tpu_slices import SLICES
from tfgpipe.devices import tpu_topology

pytestmark = pytest.mark.pure


_SHAPES = st.tuples(
    st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(1, 2)
)
_TORUS = st.tuples(st.booleans(), st.booleans(), st.booleans())


@st.composite
def _meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(_SHAPES)
    num_stages = draw(st.integers(1, math.prod(shape)))
    num_replicas = draw(st.integers(1, math.prod(shape) // num_stages))
    return shape, num_stages, num_replicas


def _check(
    found: tuple[tuple[tpu_topology.Core, ...], ...],
    shape: tuple[int, ...],
    torus: tpu_topology.Torus,
) -> None:
    used = [core for path in found for core in path]
    assert len(set(used)) == len(used)
    assert all(0 <= i < n for core in used for i, n in zip(core, shape, strict=True))
    for path in found:
        for a, b in itertools.pairwise(path):
            assert tpu_topology.adjacent(a, b, shape, torus)


@given(_meshes())
def test_whatever_fits_has_neighbouring_stages_on_neighbouring_chips(
    mesh: tuple[tuple[int, ...], int, int],
) -> None:
    shape, num_stages, num_replicas = mesh
    found = tpu_topology.assign_cores(
        shape, num_stages=num_stages, num_replicas=num_replicas
    )
    assert [len(path) for path in found] == [num_stages] * num_replicas
    _check(found, shape, (False, False, False))


@given(_meshes(), _TORUS, st.data())
def test_missing_cores_are_left_out(
    mesh: tuple[tuple[int, ...], int, int],
    torus: tpu_topology.Torus,
    data: st.DataObject,
) -> None:
    shape, num_stages, num_replicas = mesh
    cores = list(itertools.product(*map(range, shape)))
    missing = data.draw(st.sets(st.sampled_from(cores), max_size=3))
    try:
        found = tpu_topology.assign_cores(
            shape,
            num_stages=num_stages,
            num_replicas=num_replicas,
            missing=missing,
            torus=torus,
        )
    except ValueError:
        assert missing
        return
    assert not missing & {core for path in found for core in path}
    _check(found, shape, torus)


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_slices_that_there_are_hold_whole_numbers_of_pipelines(
    name: str, num_stages: int
) -> None:
    shape = SLICES[name]
    num_replicas = math.prod(shape) // num_stages
    if num_replicas:
        found = tpu_topology.assign_cores(
            shape, num_stages=num_stages, num_replicas=num_replicas
        )
        _check(found, shape, (False, False, False))


def test_two_stages_of_a_v3_are_on_one_chip() -> None:
    found = tpu_topology.assign_cores(SLICES["v3-8"], num_stages=2, num_replicas=4)
    assert all(a[:3] == b[:3] for a, b in found)


def test_stages_of_a_v4_are_on_chips_of_their_own() -> None:
    (path,) = tpu_topology.assign_cores(SLICES["v4-8"], num_stages=4)
    assert path == ((0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0), (0, 1, 0, 0))


@pytest.mark.parametrize("torus", [*itertools.product([False, True], repeat=3)])
def test_neighbours_are_a_step_apart_along_one_axis_around_it_where_it_is_a_torus(
    torus: tpu_topology.Torus,
) -> None:
    shape = (4, 3, 3, 2)
    cores = list(itertools.product(*map(range, shape)))
    for core in cores:
        chips = {core[:3]}
        for axis, step in itertools.product(range(3), (-1, 1)):
            chip = list(core[:3])
            chip[axis] += step
            if torus[axis]:
                chip[axis] %= shape[axis]
            chips.add(tuple(chip))
        for other in cores:
            expected = other[:3] in chips
            assert tpu_topology.adjacent(core, other, shape, torus) == expected


def test_a_torus_is_used_where_it_is_said_to_be_one() -> None:
    # One row of four without its second chip: 0 . 2 3
    missing = [(1, 0, 0, 0)]
    with pytest.raises(ValueError, match="need 3 TPU cores"):
        tpu_topology.assign_cores((4, 1, 1, 1), num_stages=3, missing=missing)
    (path,) = tpu_topology.assign_cores(
        (4, 1, 1, 1), num_stages=3, missing=missing, torus=(True, False, False)
    )
    assert [x for x, *_ in path] == [2, 3, 0]


def test_a_missing_chip_is_gone_around_along_another_axis() -> None:
    # Rows of two, and four in a chain only along the columns.
    #   x  3
    #   .  2
    #   0  1
    found = tpu_topology.assign_cores(
        (2, 3, 1, 1), num_stages=4, missing=[(0, 1, 0, 0)]
    )
    _check(found, (2, 3, 1, 1), (False, False, False))


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(9, 1), (4, 3), (3, 3)])
def test_too_many_are_refused_with_the_numbers(
    num_stages: int, num_replicas: int
) -> None:
    with pytest.raises(ValueError, match=r"need \d+ TPU cores.*2 x 2 x 1 x 2.*8 cores"):
        tpu_topology.assign_cores(
            SLICES["v3-8"], num_stages=num_stages, num_replicas=num_replicas
        )


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (-1, 2)])
def test_numbers_below_one_are_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least one stage and one replica"):
        tpu_topology.assign_cores(
            (2, 2, 1, 1), num_stages=numbers[0], num_replicas=numbers[1]
        )
