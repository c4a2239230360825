"""Who keeps what is kept once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfgpipe.distribution.zero import Ownership


@given(st.integers(1, 5), st.lists(st.integers(0, 1000), max_size=30))
def test_no_device_holds_more_than_another_by_more_than_one_thing(number, sizes):
    owners, devices = Ownership(), [f"GPU:{d}" for d in range(number)]
    held = [0] * number
    for size in sizes:
        held[owners.take(devices, size)] += size
    assert max(held) - min(held) <= max(sizes, default=0)


def test_who_owns_something_goes_on_owning_it():
    owners, devices = Ownership(), ["GPU:0", "GPU:1"]
    first = [owners.of(name, devices, 8) for name in "abcd"]
    assert first == [0, 1, 0, 1]
    assert [owners.of(name, devices, 8) for name in "dcba"] == [1, 0, 1, 0]


def test_stages_do_not_count_for_one_another():
    owners = Ownership()
    assert owners.take(["GPU:0", "GPU:2"], 100) == 0
    assert owners.take(["GPU:1", "GPU:3"], 1) == 0
    assert owners.take(["GPU:0", "GPU:2"], 1) == 1


def test_what_is_gone_leaves_room():
    owners, devices = Ownership(), ["GPU:0", "GPU:1"]
    assert owners.of("a", devices, 100) == 0
    assert owners.of("b", devices, 10) == 1
    owners.release("a")
    assert "a" not in owners
    assert owners.of("c", devices, 1) == 0
