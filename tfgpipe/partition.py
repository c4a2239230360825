"""Where to cut a sequence of layers into stages.

`balanced` finds the contiguous cut whose heaviest stage is as light as possible. It is
exact: the classic linear-partition dynamic program over (first i layers, k stages), in
O(K L^2) steps, which for 1000 layers and 8 stages is still well under ten seconds and
for the usual few dozen is nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def balanced(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Returns the number of layers in each stage, minimising the heaviest stage.

    Every stage gets at least one layer. Among equally good cuts of the layers so far
    the one with the least sum of squared stage costs goes on, which keeps lighter
    stages even too.

    >>> balanced([1, 2, 3, 4, 5, 6], 2)
    (4, 2)
    >>> balanced([10, 1, 1, 1], 2)
    (1, 3)
    >>> balanced([0, 0, 0, 0], 2)
    (2, 2)

    Args:
        costs: The cost of each layer, in any unit, none negative.
        num_stages: K, at least 1 and at most the number of layers.

    Raises:
        ValueError: If there are fewer layers than stages, or no stage at all.
    """
    num_layers = len(costs)
    check_num_stages(num_stages, num_layers)
    # Layers count a little by themselves, so that weightless ones spread evenly too.
    epsilon = (sum(costs) or 1.0) * 1e-9
    sums = [0.0, *itertools.accumulate(cost + epsilon for cost in costs)]
    # best[i] = (heaviest stage, sum of squares, counts) for the first i layers.
    best: list[tuple[float, float, tuple[int, ...]] | None]
    best = [(0.0, 0.0, ())] + [None] * num_layers
    for stage in range(1, num_stages + 1):
        following: list[tuple[float, float, tuple[int, ...]] | None]
        following = [None] * (num_layers + 1)
        for end in range(stage, num_layers - (num_stages - stage) + 1):
            choices = []
            for start in range(stage - 1, end):
                before = best[start]
                if before is None:
                    continue
                cost = sums[end] - sums[start]
                heaviest = max(before[0], cost)
                squares = before[1] + cost * cost
                choices.append((heaviest, squares, (*before[2], end - start)))
            following[end] = min(choices)
        best = following
    solution = best[num_layers]
    assert solution is not None  # num_stages <= num_layers makes a cut possible.
    return solution[2]


def check_num_stages(num_stages: int, num_layers: int) -> None:
    """Raises ValueError unless `num_layers` layers can fill `num_stages` stages."""
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            "`num_stages` must be between 1 and the number of layers, since every "
            f"stage holds at least one layer. Received num_stages={num_stages} for "
            f"{num_layers} layers. Use fewer stages, or split a layer in two."
        )


def check_counts(counts: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Returns a user's layer counts as a tuple, once they are known to make sense.

    Raises:
        ValueError: If a count is not a positive integer or the sum is wrong.
    """
    if not counts or any(not isinstance(c, int) or c < 1 for c in counts):
        raise ValueError(
            "A `balance` list holds the number of layers of each stage, each at least "
            f"1. Received balance={list(counts)}. Drop the empty stages, or use "
            'balance="params".'
        )
    if sum(counts) != num_layers:
        raise ValueError(
            "A `balance` list must add up to the number of layers. Received "
            f"balance={list(counts)}, which adds up to {sum(counts)}, for {num_layers} "
            'layers. Correct the list, or use balance="params".'
        )
    return tuple(counts)


def spans(counts: Sequence[int]) -> tuple[slice, ...]:
    """Returns the slice of layers that each stage holds.

    >>> spans((2, 1))
    (slice(0, 2, None), slice(2, 3, None))
    """
    ends = list(itertools.accumulate(counts))
    starts = [0, *ends[:-1]]
    return tuple(slice(a, b) for a, b in zip(starts, ends, strict=True))
