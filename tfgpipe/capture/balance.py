"""A user's `balance`: the number of calls in each stage."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral


def check_calls_per_stage(
    counts: Sequence[int], names: Sequence[str]
) -> tuple[int, ...]:
    """Returns a user's calls per stage as a tuple, after checking them.

    Args:
        counts: For each stage its number of calls.
        names: The names of the layers called, in order.

    Raises:
        ValueError: If a count is not a positive integer or the sum is wrong.
    """
    wrong = (
        not isinstance(c, Integral) or isinstance(c, bool) or c < 1 for c in counts
    )
    if not counts or any(wrong):
        raise ValueError(
            "A `balance` list holds the number of calls of layers in each stage, each "
            f"at least 1. Received balance={list(counts)}. Drop the empty stages, or "
            'use balance="params".'
        )
    if sum(counts) != len(names):
        raise ValueError(
            "A `balance` list adds up to the number of calls of layers and operations, "
            "inputs not counted, those in models inside one by one. Received "
            f"balance={list(counts)}, which adds up to {sum(counts)}, for "
            f"{len(names)} calls: {_names_text(names)}. Correct the list, use "
            f'balance="params", or name the layers that end each stage but the last'
            f"{_example_names(names, len(counts))}."
        )
    return tuple(map(int, counts))


def _names_text(names: Sequence[str]) -> str:
    """Returns names, the middle of a long list left out."""
    if len(names) <= 12:
        return ", ".join(names)
    return ", ".join([*names[:6], f"... ({len(names) - 11} more)", *names[-5:]])


def _example_names(names: Sequence[str], num_stages: int) -> str:
    """Returns names that would make so many stages, as an argument."""
    if not 1 < num_stages <= len(names):
        return ""
    ends = [k * len(names) // num_stages for k in range(1, num_stages)]
    example = [names[end - 1] for end in ends]
    unique = all(names.count(name) == 1 for name in example)
    return f", as balance={example}" if unique else ""
