"""How far arrays are apart, measured in what is tolerated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

TOLERANCES = {
    # Sums in another order; of convolutions also by other algorithms.
    "float32": 5e-5,
    # Eight rounding units, as in the tests on CPUs.
    "mixed_float16": 8 * 2**-10,
    "mixed_bfloat16": 8 * 2**-7,
}


def difference(expected: Sequence[Any], received: Sequence[Any], t: float) -> float:
    """Returns the largest difference of arrays, of what is tolerated.

    That is `t` times an entry and `t` times the largest of all. One that is missing in
    one of both, or no number, is infinitely different; integers are equal or are not.

    >>> difference([np.array([1.0, 0.0])], [np.array([1.0, 1e-3])], 1e-3)
    1.0

    Args:
        expected: Arrays, or None.
        received: Likewise, of the same shapes.
        t: The tolerance.
    """
    pairs = list(zip(expected, received, strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return np.inf
    arrays = [(np.asarray(a), np.asarray(b)) for a, b in pairs if a is not None]
    if any(a.shape != b.shape for a, b in arrays):
        return np.inf
    exact = [(a, b) for a, b in arrays if not np.issubdtype(a.dtype, np.floating)]
    if any(np.any(a != b) for a, b in exact):
        return np.inf
    floats = [
        (a.astype(float), b.astype(float))
        for a, b in arrays
        if np.issubdtype(a.dtype, np.floating) and a.size
    ]
    scale = max((np.max(np.abs(a)) for a, _ in floats), default=0.0)
    scale = max(scale, np.finfo(np.float32).tiny)
    found = [np.max(np.abs(a - b) / (t * (np.abs(a) + scale))) for a, b in floats]
    largest = max(found, default=0.0)
    return float(largest) if np.isfinite(largest) else np.inf
