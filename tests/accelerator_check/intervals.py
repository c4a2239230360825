"""How long things happen at the same time."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns disjoint intervals that cover the same, in order.

    >>> union([(3, 4), (0, 1), (0.5, 2)])
    [(0, 2), (3, 4)]
    """
    made: list[Interval] = []
    for start, end in sorted(intervals):
        if made and start <= made[-1][1]:
            made[-1] = (made[-1][0], max(end, made[-1][1]))
        else:
            made.append((start, end))
    return made


def total(intervals: Iterable[Interval]) -> float:
    """Returns how much intervals cover together.

    >>> total([(0, 2), (1, 3)])
    3
    """
    return sum(end - start for start, end in union(intervals))


def overlap(some: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Returns how much is in both.

    >>> overlap([(0, 2), (5, 6)], [(1, 3), (1.5, 4)])
    1

    Args:
        some: Intervals.
        others: Intervals.
    """
    some, others = list(some), list(others)
    return total(some) + total(others) - total([*some, *others])
