"""What a pipeline is to compute, written a second time: nothing here is of `tfgpipe`.

A mini-batch of B rows is M microbatches of B // M or B // M + 1 rows, the larger ones
first, and those without rows do not count: `np.array_split`. What an option of the
pipeline does to values is a layer here, for a plain model to have. Weights in T shards
are equal parts along one axis, padded at its end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers

# -- microbatches ---------------------------------------------------------------------


def microbatches(num_rows: int, num_microbatches: int) -> list[slice]:
    """Returns the rows of each microbatch that has some."""
    cut = np.array_split(np.arange(num_rows), num_microbatches)
    return [slice(rows[0], rows[-1] + 1) for rows in cut if rows.size]


def mask_of(tensor: Any) -> Any:
    """Returns the mask that Keras has put on a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


class OneAfterAnother:
    """A plain model that takes a mini-batch in microbatches, for `compare.run`.

    What dropout and batch statistics do then is what they should do in a pipeline.
    """

    def __init__(self, model: keras.Model, num_microbatches: int) -> None:
        self._model = model
        self._num_microbatches = num_microbatches
        self.losses: list[tf.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, inputs: Any, *, training: bool, **side_inputs: Any) -> Any:
        given = (inputs, side_inputs)
        flat = keras.tree.flatten(given)
        num_rows = next(x for x in flat if x is not None).shape[0]
        made, losses = [], []
        for rows in microbatches(num_rows, self._num_microbatches):
            piece = [None if x is None else x[rows] for x in flat]
            x, sides = keras.tree.pack_sequence_as(given, piece)
            made.append(self._model(x, training=training, **sides))
            fraction = (rows.stop - rows.start) / num_rows
            losses += [fraction * loss for loss in self._model.losses]
        self.losses = losses
        return keras.tree.map_structure(self._joined, *made)

    @staticmethod
    def _joined(*pieces: tf.Tensor) -> tf.Tensor:
        joined = tf.concat(pieces, axis=0)
        masks = [mask_of(piece) for piece in pieces]
        if masks[0] is not None:
            joined._keras_mask = tf.concat(masks, axis=0)
        return joined


class InMicrobatches(keras.Model):
    """A plain model that takes a mini-batch in microbatches when it trains."""

    def __init__(self, model: keras.Model, num_microbatches: int) -> None:
        super().__init__()
        self.model = model
        self.num_microbatches = num_microbatches

    def call(self, x: Any, training: bool | None = None) -> Any:
        if not training:
            return self.model(x, training=False)
        one_by_one = OneAfterAnother(self.model, self.num_microbatches)
        return one_by_one(x, training=True)


class DeferredNorm(layers.Layer):
    """Normalises microbatches one by one and moves averages by all of them."""

    def __init__(self, num_microbatches: int, **arguments: Any) -> None:
        super().__init__(dtype=arguments.get("dtype"))
        self.num_microbatches = num_microbatches
        self.norm = layers.BatchNormalization(**arguments)
        self.supports_masking = True

    def build(self, shape: Any) -> None:
        self.norm.build(shape)

    def call(self, x: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not training:
            return self.norm(x, training=False)
        averages = self.norm.non_trainable_variables
        before = [tf.identity(average.value) for average in averages]
        pieces = [
            self.norm(x[rows], training=True, mask=None if mask is None else mask[rows])
            for rows in microbatches(x.shape[0], self.num_microbatches)
        ]
        for average, value in zip(averages, before, strict=True):
            average.assign(value)
        self.norm(x, training=True, mask=mask)
        return tf.concat(pieces, axis=0)


# -- stages ---------------------------------------------------------------------------


def even_cut(num_layers: int, num_stages: int) -> list[int]:
    """Returns how many layers each stage has, the first ones one more."""
    least, more = divmod(num_layers, num_stages)
    return [least + (k < more) for k in range(num_stages)]


def with_crossings(
    stack: Sequence[layers.Layer], balance: Sequence[int], transfer_dtype: str
) -> list[layers.Layer]:
    """Returns layers with one more at each boundary, that rounds as the way does."""
    made, rest = [], list(stack)
    for size in balance[:-1]:
        made += [*rest[:size], Crosses(transfer_dtype)]
        rest = rest[size:]
    return [*made, *rest]


class Crosses(layers.Layer):
    """What going to another stage does to a value."""

    def __init__(self, way: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.way = way
        self.supports_masking = True

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def crossed(x: Any) -> Any:
            if self.way.startswith("int8"):
                return stepped(x, self.way), lambda dy: dy
            return rounded(x, self.way), lambda dy: rounded(dy, self.way)

        return crossed(x)


def rounded(x: Any, dtype: str) -> Any:
    return tf.cast(tf.cast(x, dtype), x.dtype)


def stepped(x: Any, way: str) -> Any:
    axes = list(range(1, len(x.shape)) if way == "int8" else range(len(x.shape) - 1))
    largest = tf.reduce_max(tf.abs(x), axis=axes, keepdims=True)
    scale = tf.where(largest > 0, largest / 127, 1.0)
    return tf.round(x / scale) * scale


# -- shards ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shards:
    """Which variables of a model with shards are which variable of one without.

    Args:
        plain: The variables without.
        sharded: Those with, in the same order, parts of one after another.
        num_shards: T.
    """

    plain: Sequence[keras.Variable]
    sharded: Sequence[keras.Variable]
    num_shards: int

    @functools.cached_property
    def _axes(self) -> list[int | None]:
        """For each weight the axis that it is cut along, if it is."""
        rest, axes = list(self.sharded), []
        for variable in self.plain:
            shape, part = tuple(variable.shape), tuple(rest[0].shape)
            if part == shape:
                axes.append(None)
                rest = rest[1:]
                continue
            (axis,) = (i for i, n in enumerate(shape) if part[i] != n)
            assert part[axis] == math.ceil(shape[axis] / self.num_shards), part
            parts, rest = rest[: self.num_shards], rest[self.num_shards :]
            assert [tuple(p.shape) for p in parts] == [part] * self.num_shards
            axes.append(axis)
        assert not rest, rest
        return axes

    def joined(self, values: Sequence[Any]) -> Iterator[Any]:
        """Returns values of the parts as values of the whole weights, with padding."""
        rest = iter(values)
        for axis in self._axes:
            if axis is None:
                yield next(rest)
                continue
            parts = [next(rest) for _ in range(self.num_shards)]
            missing = [part is None for part in parts]
            assert all(missing) == any(missing), "Some parts have a gradient."
            yield None if missing[0] else np.concatenate(parts, axis)

    def assign(self) -> None:
        """Gives the parts the values of the whole weights."""
        rest = iter(self.sharded)
        for variable, axis in zip(self.plain, self._axes, strict=True):
            if axis is None:
                next(rest).assign(variable.value)
                continue
            value = np.asarray(variable.value)
            missing = -value.shape[axis] % self.num_shards
            widths = [(0, missing * (i == axis)) for i in range(value.ndim)]
            for part in np.split(np.pad(value, widths), self.num_shards, axis):
                next(rest).assign(part)
