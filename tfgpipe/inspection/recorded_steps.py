"""Training steps whose results are kept, to be compared.

A model is compiled with an optimizer that keeps the gradients, and changes no weight:
Adam without memory has them in its first moments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.devices import sharding
from tfgpipe.distribution import seed_offset
from tfgpipe.inspection import model_copies

# Of float16: so small that few gradients overflow.
_LOSS_SCALE = 1024.0


def recording(model: keras.Model) -> keras.Model:
    """Returns a model after compiling it anew, to keep its gradients."""
    arguments = keras_internals.compiled.compile_arguments(model)
    recorder: keras.optimizers.Optimizer = keras.optimizers.Adam(0.0, beta_1=0.0)
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        recorder = keras.optimizers.LossScaleOptimizer(recorder, _LOSS_SCALE)
    others = {"metrics": None, "weighted_metrics": None, "steps_per_execution": 1}
    model.compile(**{**arguments, **others, "optimizer": recorder})
    return model


class InMicrobatches(keras.Model):
    """Plain Keras on a mini-batch that it takes in microbatches.

    Args:
        model: The model.
        num_microbatches: M.
        num_replicas: D, each with rows, and in training with random numbers, of its
            own. All begin with the same statistics, of which those of the first stay.
    """

    def __init__(
        self, model: keras.Model, num_microbatches: int, num_replicas: int
    ) -> None:
        super().__init__(name=model.name)
        self.model = model
        self.num_microbatches, self.num_replicas = num_microbatches, num_replicas

    @classmethod
    def of(
        cls, model: keras.Model, num_microbatches: int, num_replicas: int
    ) -> keras.Model:
        """Returns a model that is compiled like the one that it is of."""
        made = cls(model, num_microbatches, num_replicas)
        made.compile(**keras_internals.compiled.compile_arguments(model))
        return made

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the outputs of all rows."""
        flat, made = keras.tree.flatten(inputs), []
        moved = [x for x in model_copies.variables(self.model) if not x.trainable]
        before, after = model_copies.values(moved), []
        for d, own in enumerate(
            microbatches(num_rows(inputs), self.num_microbatches, self.num_replicas)
        ):
            _assign(moved, before)
            for seed in keras_internals.layers.seed_states(self.model):
                seed.assign(seed.value + seed_offset(d, seed.value.dtype))
            for rows in own:
                piece = [None if x is None else x[rows] for x in flat]
                x = keras.tree.pack_sequence_as(inputs, piece)
                made.append(self.model(x, training=bool(training)))
            after.append(model_copies.values(moved))
        _assign(moved, after[0])
        return keras.tree.map_structure(lambda *x: tf.concat(x, axis=0), *made)

    @property
    def losses(self) -> list[tf.Tensor]:
        """The losses that layers add, the mean over microbatches of each."""
        added = super().losses
        of_weights = sum(x.regularizer is not None for x in self.trainable_variables)
        count = len(added) - of_weights
        number = self.num_microbatches * self.num_replicas
        return [*(loss / number for loss in added[:count]), *added[count:]]


def _assign(variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def num_rows(inputs: Any) -> int:
    """Returns the number of examples of a mini-batch."""
    return next(x for x in keras.tree.flatten(inputs) if x is not None).shape[0]


def microbatches(
    num_rows: int, num_microbatches: int, num_replicas: int
) -> list[list[slice]]:
    """Returns for each replica the rows of each microbatch that has some.

    >>> microbatches(8, 2, num_replicas=2)
    [[slice(0, 2, None), slice(2, 4, None)], [slice(4, 6, None), slice(6, 8, None)]]
    """
    return [
        [
            slice(int(x[0]), int(x[-1]) + 1)
            for x in np.array_split(rows, num_microbatches)
            if x.size
        ]
        for rows in np.array_split(np.arange(num_rows), num_replicas)
    ]


@dataclasses.dataclass(frozen=True)
class Step:
    """The results of a model for a mini-batch.

    Attributes:
        outputs: Its outputs in inference, by name.
        loss: The loss of a training step.
        gradients: The gradient of each weight, by path.
        state: The value of every other variable after the step.
    """

    outputs: Mapping[str, np.ndarray]
    loss: float
    gradients: Mapping[str, np.ndarray]
    state: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, model: keras.Model, batch: tuple[Any, ...]) -> Step:
        """Runs a model."""
        count = num_rows(batch[0])
        outputs = keras.tree.flatten(model.predict(batch[0], count, verbose=0))
        history = model.fit(
            *batch[:2],
            sample_weight=batch[2] if len(batch) > 2 else None,
            batch_size=count,
            verbose=0,
            shuffle=False,
        ).history
        kept = keras_internals.optimizers.optimizer_slots(model.optimizer)
        recorder = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        if not int(keras.ops.convert_to_numpy(recorder.iterations)):
            raise ValueError(
                "Gradients are compared. Received a model in float16, one of whose "
                "gradients is not finite, so that its optimizer skips the step. Verify "
                "it in float32 or bfloat16."
            )
        trained = {id(x) for x in model.trainable_variables}

        def gradient(weight: sharding.ShardedWeight) -> sharding.ShardedWeight:
            slots = tuple(kept[part][0] for part in weight.parts)
            return dataclasses.replace(weight, parts=slots)

        gradients, others = {}, {}
        for variable in model_copies.state(model):
            if id(variable.parts[0]) in trained:
                gradients[variable.path] = _array(gradient(variable))
            else:
                others[variable.path] = _array(variable)
        return cls(
            {f"output {i}": _widest(x) for i, x in enumerate(outputs)},
            float(history["loss"][0]),
            gradients,
            others,
        )


def _array(variable: sharding.ShardedWeight) -> np.ndarray:
    return _widest(variable.full())


def _widest(values: Any) -> np.ndarray:
    """Returns values in the widest type of their kind."""
    array = np.asarray(keras.ops.convert_to_numpy(values))
    return array if array.dtype.kind in "iub" else array.astype("float64")
