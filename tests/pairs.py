"""Few cases that together hold every pair of values of all factors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Factors = Mapping[str, Sequence[Any]]


def all_pairs(factors: Factors) -> tuple[tuple, ...]:
    """Returns cases, one value of each factor in turn, greedily chosen."""
    names = list(factors)
    wanted = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(names)), 2)
        for a in factors[names[i]]
        for b in factors[names[j]]
    }
    rng = random.Random(0)
    cases = []
    while wanted:
        (i, a), (j, b) = min(wanted, key=repr)
        best, best_new = None, -1
        for _ in range(60):
            case = [rng.choice(factors[name]) for name in names]
            case[i], case[j] = a, b
            new = len(wanted & pairs_of(case))
            if new > best_new:
                best, best_new = tuple(case), new
        cases.append(best)
        wanted -= pairs_of(best)
    return tuple(cases)


def pairs_of(case: Sequence[Any]) -> set:
    """Returns the pairs of values that a case holds, each with its factor's place."""
    return set(itertools.combinations(enumerate(case), 2))


def assert_covers_all_pairs(factors: Factors, cases: Sequence[Sequence[Any]]) -> None:
    held = set().union(*map(pairs_of, cases))
    for (i, a), (j, b) in itertools.combinations(enumerate(factors.values()), 2):
        for pair in itertools.product(a, b):
            assert ((i, pair[0]), (j, pair[1])) in held
