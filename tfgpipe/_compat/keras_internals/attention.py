"""Attention layers that are called on new positions, with keys and values stored."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

import keras
import tensorflow as tf

from tfgpipe._compat.keras_internals.layers import inner_layers
from tfgpipe._compat.keras_internals.substitution import as_subclasses

Attention: TypeAlias = (
    keras.layers.MultiHeadAttention | keras.layers.GroupQueryAttention
)
Store = Callable[[tf.Tensor], tf.Tensor]


def attention_layers(layer: Any) -> list[Attention]:
    """Returns the attention layers of Keras in a layer, which can be one itself."""
    return [x for x in inner_layers(layer) if isinstance(x, Attention)]


def key_value_shape(layer: Any, width: int) -> tuple[int, int]:
    """Returns the heads, and the numbers in each, of a layer's keys.

    keras-hub's attention layers have no public name for either that all share, nor for
    their projections.

    Args:
        layer: The layer.
        width: Numbers that it is given for each position.

    Raises:
        ValueError: If no layer inside projects keys.
    """
    for inner in inner_layers(layer):
        for name in ("_key_dense", "key_dense"):
            dense = getattr(inner, name, None)
            if dense is not None:
                return tuple(dense.compute_output_shape((1, 1, width))[-2:])
    raise ValueError(
        "The shape of a cache is that of a layer's keys. Received layer "
        f"'{layer.name}', which takes a cache, and has no projection of keys alone."
    )


def called_on_new_positions(
    layer: Any, store: Store, index: tf.Tensor | None, length: int
) -> contextlib.AbstractContextManager[None]:
    """Inside, attention layers within a layer hand keys and values to a store.

    Keras' layers have no cache, and no hook between projecting keys and using them.

    Args:
        layer: The layer, or an attention layer itself.
        store: Function that is given the projected keys of a call, then its values, and
            returns those to attend to. # [B, T, N, H]
        index: The first of the new positions; they attend to none after their own. None
            where all positions are new, and attended to as the layer itself does.
        length: Number of stored positions.
    """
    classes = {
        id(x): _storing(type(x), store, index, length) for x in attention_layers(layer)
    }
    inner: Iterable[Any] = inner_layers(layer)
    if index is not None:
        classes |= {
            id(x): _moved(type(x), index)
            for x in inner
            if "start_index" in x.call_signature_parameters and id(x) not in classes
        }
    return as_subclasses(
        [x for x in inner if id(x) in classes], lambda x: classes[id(x)]
    )


def _storing(cls: type, store: Store, index: tf.Tensor | None, length: int) -> type:
    """Returns a class of attention layers whose keys and values go through a store."""

    class Storing(cls):
        @property
        def _key_dense(self) -> Callable[[tf.Tensor], tf.Tensor]:
            return self._stored("_key_dense")

        @property
        def _value_dense(self) -> Callable[[tf.Tensor], tf.Tensor]:
            return self._stored("_value_dense")

        def _stored(self, name: str) -> Callable[[tf.Tensor], tf.Tensor]:
            dense = vars(self)[name]
            return lambda x: store(dense(x))

        def call(self, query: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if index is None:
                return super().call(query, value, *args, **kwargs)
            window = getattr(self, "_sliding_window", None)
            window = window or getattr(self, "sliding_window", None)
            given = kwargs.pop("attention_mask", None)
            kwargs.pop("use_causal_mask", None)
            mask = _visible(index, query.shape[1], length, window, given)
            return super().call(query, value, *args, attention_mask=mask, **kwargs)

    return cast(type, functools.update_wrapper(Storing, cls, updated=()))


def _moved(cls: type, index: tf.Tensor) -> type:
    """Returns a class of layers that count positions from an index on."""

    class Moved(cls):
        def call(self, *args: Any, **kwargs: Any) -> Any:
            return super().call(*args, **{**kwargs, "start_index": index})

    return cast(type, functools.update_wrapper(Moved, cls, updated=()))


def _visible(
    index: tf.Tensor,
    new: int,
    length: int,
    window: int | None,
    given: tf.Tensor | None,
) -> tf.Tensor:
    """Returns the positions that each new one attends to, `[1 or B, T, L]`.

    Args:
        index: The first of the new positions.
        new: T, their number.
        length: L.
        window: Number of positions that a new one attends to at most.
        given: A mask of all pairs of positions, which holds as well.
    """
    rows = index + tf.range(new)[:, None]
    distance = rows - tf.range(length)[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if given is None or given.shape[-1] != length:  # Of the new positions alone.
        return visible[None]
    if given.shape[-2] == length:
        given = tf.gather(given, rows[:, 0], axis=-2)
    return visible & tf.cast(given, tf.bool)
