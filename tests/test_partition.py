"""The cut into stages, against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpipe import partition


def heaviest(costs, counts):
    return max(sum(costs[span]) for span in partition.spans(counts))


def all_cuts(num_layers, num_stages):
    for ends in itertools.combinations(range(1, num_layers), num_stages - 1):
        bounds = [0, *ends, num_layers]
        yield tuple(b - a for a, b in itertools.pairwise(bounds))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.data())
def test_no_cut_has_a_lighter_heaviest_stage(costs, data):
    num_stages = data.draw(st.integers(1, min(5, len(costs))))
    counts = partition.balanced(costs, num_stages)
    assert len(counts) == num_stages
    assert sum(counts) == len(costs)
    assert min(counts) >= 1
    best = min(heaviest(costs, cut) for cut in all_cuts(len(costs), num_stages))
    assert heaviest(costs, counts) == best


@pytest.mark.parametrize(
    ("costs", "num_stages", "counts"),
    [
        # Two cuts that a well-known greedy algorithm gets wrong.
        ([10, 1, 1, 1], 2, (1, 3)),
        ([1] * 16, 4, (4, 4, 4, 4)),
        ([1, 2, 3, 4, 5, 6], 2, (4, 2)),
        ([0, 0, 0, 0, 0], 2, (3, 2)),
        ([7], 1, (1,)),
    ],
)
def test_known_cuts(costs, num_stages, counts):
    received = partition.balanced(costs, num_stages)
    assert sorted(received) == sorted(counts)
    assert heaviest(costs, received) == heaviest(costs, counts)


@pytest.mark.parametrize("num_stages", [0, 4])
def test_a_number_of_stages_that_layers_cannot_fill_is_refused(num_stages):
    with pytest.raises(ValueError, match=f"num_stages={num_stages} for 3 layers"):
        partition.balanced([1, 1, 1], num_stages)


def test_spans_follow_each_other():
    assert partition.spans((2, 1, 3)) == (slice(0, 2), slice(2, 3), slice(3, 6))
