"""The calls of each stage, as slices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def stage_spans(counts: Sequence[int]) -> tuple[slice, ...]:
    """Returns the slice of calls that each stage has.

    >>> stage_spans((2, 1))
    (slice(0, 2, None), slice(2, 3, None))
    """
    ends = itertools.accumulate(counts, initial=0)
    return tuple(slice(a, b) for a, b in itertools.pairwise(ends))
