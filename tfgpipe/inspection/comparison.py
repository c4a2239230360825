"""Tensors of one step beside those of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfgpipe.inspection.recorded_steps import Step

# Deviations that such an error of the weights explains, as there is one in every sum.
TIMES = 8.0
# A tensor counts as no smaller than that part of the largest of its kind: of a gradient
# that is zero but for rounding, nothing is left to compare.
_LEAST = 1e-2


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A tensor of the pipeline beside that of plain Keras.

    Attributes:
        kind: `"output"`, `"loss"`, `"gradient"` or `"state"`.
        name: Name of the output, or path of the variable.
        deviation: The largest difference of an entry, over the largest entry of plain
            Keras'.
        rounding: The deviation of plain Keras if its weights are off by a rounding; if
            that was not needed 0, or of a loss the distance of numbers in its type.
    """

    kind: str
    name: str
    deviation: float
    rounding: float = 0.0

    def is_within(self, tolerance: float) -> bool:
        """Returns whether rounding explains the deviation."""
        return self.deviation <= max(tolerance, TIMES * self.rounding)


def compared(ours: Step, plain: Step) -> Iterator[Comparison]:
    """Yields each tensor of one step beside that of another, in the same order."""
    for kind, name in (
        ("output", "outputs"),
        ("gradient", "gradients"),
        ("state", "state"),
    ):
        mine, theirs = getattr(ours, name), getattr(plain, name)
        floats = [x for x in theirs.values() if x.dtype.kind not in "iub"]
        most = max(map(_largest, floats), default=0.0)
        pairs = zip(mine.values(), theirs.items(), strict=True)
        for value, (path, expected) in pairs:
            yield Comparison(kind, path, deviation(value, expected, _LEAST * most))
        if kind == "output":
            yield _loss(ours.loss, plain.loss)


def _loss(ours: float, plain: float) -> Comparison:
    """Returns the losses side by side, which Keras averages in its default type."""
    rounding = float(np.finfo(keras.config.floatx()).eps)
    return Comparison("loss", "loss", deviation(ours, plain), rounding)


def deviation(values: Any, expected: Any, least: float = 0.0) -> float:
    """Returns the largest difference, over the largest entry that is expected."""
    values, expected = np.asarray(values), np.asarray(expected)
    if values.shape != expected.shape:
        return float("inf")
    if values.dtype.kind in "iub":
        return float(not np.array_equal(values, expected))
    scale = max(_largest(expected), least) or 1.0
    difference = np.abs(values.astype("float64") - expected)
    same = np.isnan(values) & np.isnan(expected) | (values == expected)
    return float(np.max(np.where(same, 0.0, difference), initial=0.0)) / scale


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0))
