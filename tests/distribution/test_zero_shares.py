"""Who keeps what is kept once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpipe.distribution.zero import ZeroAssignment

pytestmark = pytest.mark.pure


@given(st.integers(1, 5), st.lists(st.integers(0, 1000), max_size=30))
def test_no_device_holds_more_than_another_by_more_than_one_thing(number, sizes):
    owners, devices = ZeroAssignment(), [f"GPU:{d}" for d in range(number)]
    held = [0] * number
    for i, size in enumerate(sizes):
        held[owners.owner(i, devices, size)] += size
    assert max(held) - min(held) <= max(sizes, default=0)


def test_who_owns_something_goes_on_owning_it():
    owners, devices = ZeroAssignment(), ["GPU:0", "GPU:1"]
    first = [owners.owner(name, devices, 8) for name in "abcd"]
    assert first == [0, 1, 0, 1]
    assert [owners.owner(name, devices, 8) for name in "dcba"] == [1, 0, 1, 0]


def test_stages_do_not_count_for_one_another():
    owners = ZeroAssignment()
    assert owners.owner("a", ["GPU:0", "GPU:2"], 100) == 0
    assert owners.owner("b", ["GPU:1", "GPU:3"], 1) == 0
    assert owners.owner("c", ["GPU:0", "GPU:2"], 1) == 1


def test_what_moves_counts_where_it_is():
    owners, first, second = ZeroAssignment(), ["GPU:0", "GPU:2"], ["GPU:1", "GPU:3"]
    for devices in (first, second, first, second):
        owner = owners.owner("a", devices, 100)
    assert owner == 0
    assert owners.owner("b", first, 10) == 0  # Nothing is left there.
    assert owners.owner("c", second, 10) == 1


def test_what_is_gone_leaves_room():
    owners, devices = ZeroAssignment(), ["GPU:0", "GPU:1"]
    assert owners.owner("a", devices, 100) == 0
    assert owners.owner("b", devices, 10) == 1
    owners.release("a")
    assert "a" not in owners
    assert owners.owner("c", devices, 1) == 0
