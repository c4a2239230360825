"""Solver of the partitioning problem for costs that add up, without tables of stages.

It finds what `solver.best_partition` finds. There every stage [s, e) has an entry in a
table; here its cost is a difference of two sums, and only stages that cost no more than
the least bottleneck are looked at, those that start with one call after another:

      0 ········ s ├──── ends e of its stages ────┤ ········ L

With L calls and K stages it takes L windows' memory and K L windows' time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tfgpipe.partition.solver import CALL_WEIGHT, TIE_TOLERANCE

Floats = npt.NDArray[np.float64]
# Halvings of the interval that holds the least bottleneck: to the last bit.
_NUM_HALVINGS = 64


def best_additive_partition(
    costs: Sequence[float],
    *,
    num_stages: int,
    received_row: Callable[[int, int], npt.ArrayLike],
    may_start: Sequence[bool],
) -> tuple[int, ...]:
    """Returns the number of calls in each stage of the best contiguous partition.

    Best as `solver.best_partition` has it, with no slack and no memory limit.

    >>> best_additive_partition(
    ...     [10, 1, 1, 1], num_stages=2,
    ...     received_row=lambda s, e: np.zeros(e - s), may_start=[True] * 4,
    ... )
    (1, 3)

    Args:
        costs: The cost of each of the L calls, in any unit, none negative.
        num_stages: K, at least 1 and at most the number of possible stages.
        received_row: A function from s and e to the bytes that the stages [s, s + 1) to
            [s, e) receive, `[e - s]`. Called for s in ascending order.
        may_start: For each call whether a stage may start with it. The first may.
    """
    each = np.asarray(costs, np.float64)
    each = each / each.max() if each.any() else np.ones_like(each)
    sums = np.concatenate([[0.0], np.cumsum(each / each.sum() * len(each))])
    starts = [s for s, may in enumerate(may_start) if may or not s]
    bounds = np.array([*starts, len(each)])  # Where stages may begin or end.
    most = _least_bottleneck(sums[bounds], num_stages) * (1 + TIE_TOLERANCE)
    rows = []
    for position, s in enumerate(starts):
        last = int(np.searchsorted(sums[bounds] - sums[s], most, side="right"))
        ends = bounds[position + 1 : last]
        received = np.zeros(0)
        if len(ends):
            received = np.asarray(received_row(s, ends[-1]))[ends - s - 1]
        squares = (sums[ends] - sums[s]) ** 2 + CALL_WEIGHT * (ends - s) ** 2
        rows.append((received, squares))
    chosen = _fewest_bytes(rows, num_stages)
    return tuple(b - a for a, b in itertools.pairwise(bounds[chosen].tolist()))


def _least_bottleneck(sums: Floats, num_stages: int) -> float:
    """Returns the least, over all partitions, of the largest cost of a stage.

    A bound is enough if stages that are each as long as it allows are enough.
    """

    def largest_stage(bound: float) -> float:
        """Returns the cost of the largest stage within a bound; infinity if none is."""
        at, largest = 0, 0.0
        for _ in range(num_stages):
            end = int(np.searchsorted(sums - sums[at], bound, side="right")) - 1
            largest = max(largest, float(sums[end] - sums[at]))
            at = end
            if at == len(sums) - 1:
                return largest
        return math.inf

    low, high = 0.0, float(sums[-1])
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        found = largest_stage(middle)
        if math.isinf(found):
            low = middle
        else:
            high = found
    return high


def _fewest_bytes(rows: Sequence[tuple[Floats, Floats]], num_stages: int) -> list[int]:
    """Returns the bounds of the partition with the fewest bytes, then the evenest.

    Args:
        rows: For each bound but the last, bytes and squares of the admissible stages
            that start there, in the order of their ends.
        num_stages: K.
    """
    size = len(rows) + 1
    fewest, evenest = np.full((2, size), math.inf)
    fewest[0] = evenest[0] = 0.0
    starts_before = []
    for _ in range(num_stages):
        new_fewest, new_evenest = np.full((2, size), math.inf)
        starts = np.zeros(size, np.intp)
        for start, (received, squares) in enumerate(rows):
            if math.isinf(fewest[start]):
                continue
            window = slice(start + 1, start + 1 + len(received))
            bytes_in = fewest[start] + received
            even = evenest[start] + squares
            equal = bytes_in == new_fewest[window]
            better = (bytes_in < new_fewest[window]) | (
                equal & (even < new_evenest[window])
            )
            np.copyto(new_fewest[window], bytes_in, where=better)
            np.copyto(new_evenest[window], even, where=better)
            np.copyto(starts[window], start, where=better)
        fewest, evenest = new_fewest, new_evenest
        starts_before.append(starts)
    bounds = [size - 1]
    for starts in reversed(starts_before):
        bounds.append(int(starts[bounds[-1]]))
    return bounds[::-1]
