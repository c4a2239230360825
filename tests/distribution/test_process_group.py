"""Metrics over processes of unequal data, against one process over all examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpipe.distribution.process_group import ProcessGroup

RANDOM = np.random.RandomState(0)
TARGETS = (RANDOM.rand(7, 3) > 0.5).astype("float32")
OUTPUTS = RANDOM.rand(7, 3).astype("float32")
# Examples of each process.
PARTS = [slice(0, 5), slice(5, 7)]


class Process(ProcessGroup):
    """One of two processes; `other` is what the other one adds to sums."""

    def __init__(self, index: int, other: tf.Tensor | None = None) -> None:
        super().__init__(
            size=2, index=index, tasks=range(index, index + 1), device="CPU:0"
        )
        self.other, self.own = other, tf.constant(0.0)

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum with the other process', and keeps what this one adds."""
        self.own = tensor
        return tensor if self.other is None else tensor + self.other


def over_processes(make: Callable[[], keras.Metric]) -> tuple[Any, keras.Metric]:
    """Returns the result in the first process, and its metric."""
    second = Process(1)
    metrics = []
    for rows in PARTS:
        metrics.append(make())
        metrics[-1].update_state(TARGETS[rows], OUTPUTS[rows])
    mine, theirs = metrics
    second.metrics_result(lambda: {"": theirs.result()}, [theirs])
    first = Process(0, second.own)
    found = first.metrics_result(lambda: {"": mine.result()}, [mine])
    return found[""], mine


@pytest.mark.parametrize(
    "make",
    [
        keras.metrics.MeanSquaredError,
        keras.metrics.RootMeanSquaredError,
        keras.metrics.AUC,
        lambda: keras.metrics.Precision(thresholds=[0.3, 0.7]),
        keras.metrics.Recall,
        lambda: keras.metrics.F1Score(threshold=0.5),
        lambda: keras.metrics.BinaryIoU(threshold=0.5),
        keras.metrics.R2Score,
        keras.metrics.CosineSimilarity,
    ],
)
def test_results_are_those_over_all_examples(make: Callable[[], Any]) -> None:
    expected = make()
    expected.update_state(TARGETS, OUTPUTS)
    found, metric = over_processes(make)
    np.testing.assert_allclose(found, expected.result(), rtol=1e-6)
    # Each process goes on with its own state.
    before = metric.result()
    expected = make()
    expected.update_state(TARGETS[PARTS[0]], OUTPUTS[PARTS[0]])
    np.testing.assert_allclose(before, expected.result(), rtol=1e-6)


class Mixed(keras.metrics.Metric):
    """A count, with a factor that is combined as `aggregation` says."""

    def __init__(self, aggregation: str) -> None:
        super().__init__(name="mixed")
        self.factor = self.add_variable((), "ones", aggregation=aggregation, name="f")
        self.count = self.add_variable((), "zeros", dtype="int64", name="count")

    def update_state(self, y: Any, p: Any) -> None:
        """Sets the factor to another value in each process."""
        self.count.assign_add(len(y))
        self.factor.assign(float(len(y)))

    def result(self) -> Any:
        """Returns the product."""
        return self.factor * keras.ops.cast(self.count, "float32")


@pytest.mark.parametrize(
    ("aggregation", "factor"), [("sum", 7.0), ("mean", 3.5), ("only_first_replica", 5)]
)
def test_state_is_combined_as_its_variables_say(
    aggregation: str, factor: float
) -> None:
    found, _ = over_processes(lambda: Mixed(aggregation))
    assert float(found) == 7 * factor


def test_state_that_does_not_say_how_it_is_combined_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"'mixed', whose variable 'mixed/f' has aggregation='none'"
    ):
        over_processes(lambda: Mixed("none"))
