"""A dense layer in shards, as small as it can be, to try stages of several devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.capture.scope import TracingScope
from tfgpipe.devices import sharding


@keras.saving.register_keras_serializable(package="tests")
class Columns(keras.layers.Layer, sharding.Sharded):
    """A dense layer that has its kernel in T parts, cut by columns.

    As part of a stage each part is multiplied on a device of its own.
    """

    def __init__(self, units: int, *, num_shards: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.num_shards = num_shards
        self.supports_masking = True

    def build(self, shape: tuple[int | None, ...]) -> None:
        T = self.num_shards
        self.sizes = [self.units // T + (t < self.units % T) for t in range(T)]
        kernels = [
            self.add_weight((shape[-1], n), name=f"kernel_{t}")
            for t, n in enumerate(self.sizes)
        ]
        biases = [
            self.add_weight((n,), name=f"bias_{t}") for t, n in enumerate(self.sizes)
        ]
        self.sharded_weights = (
            sharding.ShardedWeight("kernel", tuple(kernels), 1),
            sharding.ShardedWeight("bias", tuple(biases), 0),
        )

    def call(self, x: tf.Tensor) -> tf.Tensor:
        # Asked now: a gradient is computed when the scope has been left.
        on = _on_its_own if _is_in_a_stage() else _here
        values = []
        for weight in self.sharded_weights:
            for t, part in enumerate(weight.parts):
                with on(t):
                    values.append(tf.convert_to_tensor(part))
        rows = tf.reshape(x, [-1, x.shape[-1]])
        made = _columns(tuple(self.sizes), on)(rows, *values)
        return tf.reshape(made, [*tf.unstack(tf.shape(x))[:-1], self.units])

    def compute_output_shape(self, shape: tuple[int | None, ...]) -> tuple[Any, ...]:
        return (*shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        own = {"units": self.units, "num_shards": self.num_shards}
        return {**super().get_config(), **own}


def _columns(sizes: tuple[int, ...], on: Callable[[int], Any]) -> Any:
    T = len(sizes)

    @tf.custom_gradient
    def run(x: tf.Tensor, *weights: tf.Tensor) -> Any:
        kernels, biases = weights[:T], weights[T:]
        inputs, results = [], []
        for t in range(T):
            with on(t):
                inputs.append(tf.identity(x))
                results.append(tf.matmul(inputs[t], kernels[t]) + biases[t])

        def gradient(dy: tf.Tensor) -> list[tf.Tensor]:
            of_input, of_kernels, of_biases = [], [], []
            for t, piece in enumerate(tf.split(dy, sizes, axis=-1)):
                with on(t):
                    piece = tf.identity(piece)
                    of_input.append(tf.matmul(piece, kernels[t], transpose_b=True))
                    of_kernels.append(tf.matmul(inputs[t], piece, transpose_a=True))
                    of_biases.append(tf.reduce_sum(piece, axis=0))
            return [tf.add_n(of_input), *of_kernels, *of_biases]

        return tf.concat(results, axis=-1), gradient

    return run


def _is_in_a_stage() -> bool:
    return isinstance(keras_internals.calls.current_stateless_scope(), TracingScope)


def _on_its_own(shard: int) -> contextlib.AbstractContextManager[Any]:
    return tf.device(sharding.placeholder_device(shard))


def _here(shard: int) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()
