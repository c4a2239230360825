"""The solver for costs that add up, beside the one with tables."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpipe.partition.additive import best_additive_partition
from tfgpipe.partition.solver import best_partition

pytestmark = pytest.mark.pure


@st.composite
def problems(draw):
    """Draws costs, a table of received bytes, where stages may start, and K."""
    num_calls = draw(st.integers(1, 9))
    costs = draw(
        st.lists(st.integers(0, 5), min_size=num_calls, max_size=num_calls)
        | st.lists(st.floats(0, 1e6), min_size=num_calls, max_size=num_calls)
    )
    seed = draw(st.integers(0, 99))
    received = np.random.default_rng(seed).integers(0, 4, (num_calls + 1,) * 2)
    may_start = draw(
        st.lists(st.booleans(), min_size=num_calls, max_size=num_calls)
    )  # The first may in any case.
    num_stages = draw(st.integers(1, 1 + sum(may_start[1:])))
    return costs, received.astype(float), may_start, num_stages


@given(problems())
@settings(max_examples=400)
def test_it_finds_what_the_solver_with_tables_finds(problem):
    costs, received, may_start, num_stages = problem
    expected = best_partition(
        costs, num_stages=num_stages, received_bytes=received, may_start=may_start
    )
    found = best_additive_partition(
        costs,
        num_stages=num_stages,
        received_row=lambda s, e: received[s, s + 1 : e + 1],
        may_start=may_start,
    )
    assert found == expected


@pytest.mark.parametrize("costs", [[1.0] * 4000, [0.0] * 3999 + [1.0]])
def test_thousands_of_calls_take_no_square_of_memory(costs):
    tracemalloc.start()
    found = best_additive_partition(
        costs,
        num_stages=8,
        received_row=lambda s, e: np.ones(e - s),
        may_start=[True] * len(costs),
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(found) == 4000
    assert peak < 200e6
