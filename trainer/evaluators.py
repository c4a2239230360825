"""Further evaluations of a run, beside its validation split.

An experiment returns them by name, and `test_accuracy` is then logged as `accuracy` of
the one named `test`:

    def evaluators(self):
        return {"test": OnData(self.data.open("test"), [Accuracy()], every_steps=500)}

One of another kind is a subclass of `Evaluator` with a method of its own.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfgpipe_trainer.hyperparams import HyperparameterError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class Evaluator(abc.ABC):
    """An evaluation of a model.

    Attributes:
        every_steps: Steps between evaluations, or None for one, at the end.
    """

    every_steps: int | None = None

    @abc.abstractmethod
    def evaluate(self, model: keras.Model) -> Mapping[str, float]:
        """Returns measurements of a model, by name.

        Args:
            model: The model, with averages of its weights if there are any.
        """

    def is_due(self, step: int) -> bool:
        """Returns whether a step is followed by this evaluation."""
        return self.every_steps is not None and step % self.every_steps == 0


class OnData(Evaluator):
    """Metrics of a model's outputs on data.

    Args:
        data: Arrays such as `(x, y)`, a sequence of examples, or a `tf.data.Dataset` of
            single examples: as `Experiment.examples` returns them.
        metrics: Metrics and losses of Keras, each of the only output. A single loss is
            called `loss`.
        every_steps: Steps between evaluations. Defaults to one, at the end.
        batch_size: Examples of a batch.
        num_examples: Number of examples, spread evenly over the data. Defaults to all.
    """

    def __init__(
        self,
        data: Any,
        metrics: Sequence[Any],
        *,
        every_steps: int | None = None,
        batch_size: int = 32,
        num_examples: int | None = None,
    ) -> None:
        import keras

        self.every_steps = every_steps
        self._data, self._size, self._number = data, batch_size, num_examples
        losses = [each for each in metrics if isinstance(each, keras.losses.Loss)]
        self._metrics = [each for each in metrics if each not in losses]
        names = ["loss"] if len(losses) == 1 else [each.name for each in losses]
        self._losses = dict(zip(names, losses, strict=True))

    def evaluate(self, model: keras.Model) -> dict[str, float]:
        """Returns the values of the metrics."""
        import keras

        means = {name: keras.metrics.Mean(name=name) for name in self._losses}
        for metric in self._metrics:
            metric.reset_state()
        for batch in self._batches():
            inputs, targets, *weights = batch
            outputs = model.predict_on_batch(inputs)
            for name, loss in self._losses.items():
                # As Keras counts it: a batch has the weight of its examples.
                means[name].update_state(loss(targets, outputs, *weights), len(outputs))
            for metric in self._metrics:
                metric.update_state(targets, outputs, *weights)
        found = [*means.values(), *self._metrics]
        return {each.name: float(each.result()) for each in found}

    def _batches(self) -> Any:
        import tensorflow as tf

        from tfgpipe_trainer import batches

        if isinstance(self._data, tf.data.Dataset):
            found: tf.data.Dataset = self._data
            if self._number is not None:
                found = found.take(self._number)
            return found.batch(self._size).as_numpy_iterator()
        examples = batches.as_examples(self._data)
        count = min(len(examples), self._number or len(examples))
        indices = np.linspace(0, len(examples) - 1, count).astype(np.int64)
        return (
            examples.take(indices[first : first + self._size])
            for first in range(0, count, self._size)
        )


def measured(
    evaluators: Mapping[str, Evaluator], names: Sequence[str], model: keras.Model
) -> dict[str, float]:
    """Returns the measurements of some evaluators, each by `NAME_MEASURE`.

    Raises:
        HyperparameterError: If one is no number.
    """
    found: dict[str, float] = {}
    for name in names:
        for measure, value in evaluators[name].evaluate(model).items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise HyperparameterError(
                    f"evaluators: expected numbers of {name!r}; received {value!r} as "
                    f"{measure!r}."
                )
            found[f"{name}_{measure}"] = float(value)
    return found


def line(values: Mapping[str, float]) -> str:
    """Returns measurements on one line.

    >>> line({"test_accuracy": 0.75, "arc_accuracy": 0.5})
    'test_accuracy 0.7500, arc_accuracy 0.5000'
    """
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())
