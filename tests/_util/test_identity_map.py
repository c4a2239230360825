"""Tests of mappings keyed by identity."""

from __future__ import annotations

import pytest

from tfgpipe._util import IdentityMap, unique

pytestmark = pytest.mark.pure


class Costly:
    """Equal to all of its kind, and costly to write down, as a variable is."""

    def __eq__(self, other):
        return True

    def __repr__(self):
        raise AssertionError("written down")


def test_equal_objects_are_keys_of_their_own():
    a, b = Costly(), Costly()
    found = IdentityMap([(a, 1)])
    assert a in found
    assert b not in found
    found[b] = 2
    assert [found[a], found[b], len(found)] == [1, 2, 2]
    del found[a]
    assert list(found.values()) == [2]


def test_a_missing_key_is_not_written_down():
    found = IdentityMap()
    with pytest.raises(KeyError):
        found[Costly()]
    assert found.get(Costly()) is None
    assert found.setdefault(Costly(), 3) == 3


def test_of_each_object_the_first_occurrence_stays():
    a, b = Costly(), Costly()
    assert [x is a for x in unique([a, b, a, b])] == [True, False]
