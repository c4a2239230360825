"""Few cases that together hold every pair of values of all factors.

A grid of all pairs (Kuhn, Kacker, Lei: Introduction to Combinatorial Testing, chapter
3): a fault is mostly one of a value or of two values together, and a few dozen cases
hold all of these where the full product has thousands.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

Factors = Mapping[str, Sequence[Any]]
Rule = Callable[..., Any]
CANDIDATES = 20


def all_pairs(
    factors: Factors, *, impossible: Collection[Rule] = (), strength: int = 2
) -> tuple[tuple, ...]:
    """Returns cases, one value of each factor in turn, greedily chosen.

    Args:
        factors: The values of each factor.
        impossible: Functions of some factors, by name, that are true of values that
            cannot meet.
        strength: How many factors' values meet in every way: 2 for pairs.
    """
    asked = [
        (dict.fromkeys(inspect.signature(rule).parameters), functools.cache(rule))
        for rule in impossible
    ]
    rules = {name: [x for x in asked if name in x[0]] for name in factors}
    rng = random.Random(0)
    met: set = set()
    cases = []
    for names in itertools.combinations(factors, strength):
        for values in itertools.product(*(factors[name] for name in names)):
            wanted = tuple(zip(names, values, strict=True))
            if wanted in met:
                continue
            best, best_new = None, set()
            for _ in range(CANDIDATES):
                case = _completed(dict(wanted), factors, rules, rng)
                if case is None:
                    break  # These values cannot meet.
                new = meetings(factors, case, strength) - met
                if len(new) > len(best_new):
                    best, best_new = case, new
            if best is not None:
                cases.append(best)
                met |= best_new
    return tuple(cases)


def meetings(factors: Factors, case: Sequence[Any], strength: int = 2) -> set:
    """Returns the values that meet in a case, each with its factor's name."""
    return set(itertools.combinations(zip(factors, case, strict=True), strength))


def _completed(
    given: dict[str, Any],
    factors: Factors,
    rules: Mapping[str, Sequence[tuple[dict[str, None], Rule]]],
    rng: random.Random,
) -> tuple | None:
    """Returns a case that holds these values and breaks no rule, or None."""
    missing = [name for name in factors if name not in given]
    rng.shuffle(missing)
    case = dict(given)

    def broken(name: str) -> bool:
        return any(
            rule(*(case[name] for name in asked))
            for asked, rule in rules[name]
            if case.keys() >= asked.keys()
        )

    def has_value(name: str) -> bool:
        found = False
        for value in factors[name]:
            case[name] = value
            found = found or not broken(name)
        del case[name]
        return found

    def fill(position: int) -> bool:
        if position == len(missing):
            return True
        name, later = missing[position], missing[position + 1 :]
        related = {other for asked, _ in rules[name] for other in asked}
        for value in rng.sample(factors[name], len(factors[name])):
            case[name] = value
            # What leaves another factor no value is not gone on with.
            fits = not broken(name) and all(map(has_value, related.intersection(later)))
            if fits and fill(position + 1):
                return True
        del case[name]
        return False

    if any(map(broken, given)) or not all(map(has_value, missing)) or not fill(0):
        return None
    return tuple(case[name] for name in factors)
