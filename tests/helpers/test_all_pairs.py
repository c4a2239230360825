"""Grids of all pairs, against the full product of their factors."""

from __future__ import annotations

import itertools

import pytest

from tests.helpers import pairwise

pytestmark = pytest.mark.pure

FACTORS = {"a": (1, 2, 3, 4), "b": "xyz", "c": (None, True), "d": (1, 2, 3)}
IMPOSSIBLE = (
    lambda a, b: a == 4 and b != "x",
    lambda c, d: c and d == 3,
    lambda a, c, d: a == 1 and c is None and d < 3,
)


def whole() -> list[tuple]:
    """Returns every case that breaks no rule, by trying all."""
    rules = (
        lambda a, b, c, d: IMPOSSIBLE[0](a, b),
        lambda a, b, c, d: IMPOSSIBLE[1](c, d),
        lambda a, b, c, d: IMPOSSIBLE[2](a, c, d),
    )
    product = itertools.product(*FACTORS.values())
    return [case for case in product if not any(rule(*case) for rule in rules)]


@pytest.mark.parametrize("strength", [2, 3])
def test_all_that_can_meet_meets_in_few_cases_that_are_possible(strength):
    cases = pairwise.all_pairs(FACTORS, impossible=IMPOSSIBLE, strength=strength)
    assert set(cases) <= set(whole())
    wanted, met = (
        set().union(*(pairwise.meetings(FACTORS, case, strength) for case in some))
        for some in (whole(), cases)
    )
    assert met == wanted
    assert len(cases) < len(whole())


def test_without_rules_every_pair_meets_by_as_few_cases_as_two_factors_have():
    cases = pairwise.all_pairs({"a": (1, 2, 3), "b": (1, 2), "c": (1, 2)})
    assert len(cases) == len({case[:2] for case in cases}) == 6
