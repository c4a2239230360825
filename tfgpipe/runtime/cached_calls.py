"""Calls of layers on new positions, which remember keys and values of those before."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe._compat.keras_internals import attention
from tfgpipe.capture import Call

Cache = list[tf.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """The positions that calls are given.

    Attributes:
        index: The first. None: they are given all, and store what the others will need.
        length: L, the number of positions that are stored.
        stores: False to call layers as they are, and store nothing.
    """

    index: tf.Tensor | None
    length: int
    stores: bool = True


def has_cache(call: Call) -> bool:
    """Returns whether what a call returns depends on positions before."""
    return _own_cache(call.layer) is not None or bool(
        attention.attention_layers(call.layer)
    )


def run(
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    positions: Positions,
    cache: Sequence[tf.Tensor],
) -> tuple[Any, Cache]:
    """Calls a layer that has a cache.

    That is one that takes a cache itself, as decoder blocks of keras-hub do, by its
    arguments `cache` and `cache_update_index`, or such that end so; or one that has
    attention layers of Keras inside, whatever is around them.

    Args:
        call: The call.
        args: Its arguments. # [B, T, ...] each that is not of all positions
        kwargs: Its keyword arguments.
        positions: The T positions.
        cache: Stored tensors; none where all positions are given.

    Returns:
        The results of the layer, and all that is stored now.

    Raises:
        ValueError: If the layer does not attend as it did when it was given all.
    """
    own = _own_cache(call.layer)
    if own is not None and not attention.attention_layers(call.layer):
        return _run_with_own_cache(call, args, kwargs, positions, cache, own)
    stored: Cache = []

    def store(new: tf.Tensor) -> tf.Tensor:
        if positions.index is not None:
            if len(stored) == len(cache):
                raise _changed(call)
            # In place: TensorFlow copies nothing if no other operation reads it.
            rows = tf.range(tf.shape(new)[0])
            here = tf.stack([rows, tf.fill(tf.shape(rows), positions.index)], axis=1)
            new = tf.tensor_scatter_nd_update(cache[len(stored)], here, new[:, 0])
        stored.append(new)
        return new

    with attention.called_on_new_positions(
        call.layer, store, positions.index, positions.length
    ):
        outputs = call.layer(*args, **kwargs)
    if positions.index is None:
        return outputs, [_padded(x, positions.length) for x in stored]
    if len(stored) != len(cache):
        raise _changed(call)
    return outputs, stored


def _run_with_own_cache(
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    positions: Positions,
    cache: Sequence[tf.Tensor],
    own: _OwnCache,
) -> tuple[Any, Cache]:
    # Masks of padding and of pairs are of all positions; the layer makes its own.
    kwargs = {key: x for key, x in kwargs.items() if not _is_mask(x)}
    x, index = keras.tree.flatten((args, kwargs))[0], positions.index
    if index is None:
        heads = attention.key_value_shape(call.layer, x.shape[-1])
        shape = (keras.ops.shape(x)[0], 2, positions.length, *heads)
        cache, index = [tf.zeros(shape, call.layer.compute_dtype)], tf.constant(0)
    kwargs |= {own.cache: cache[0], own.position: index}
    outputs, stored = call.layer(*args, **kwargs)
    return outputs, [stored]


def _is_mask(x: Any) -> bool:
    return isinstance(x, tf.Tensor) and not x.dtype.is_floating


class _OwnCache(NamedTuple):
    """Names of the arguments of a layer that takes a cache."""

    cache: str
    position: str


def _own_cache(layer: Any) -> _OwnCache | None:
    """Returns the arguments for a layer's cache, if it takes one."""
    if isinstance(layer, keras.layers.Layer):
        for name in inspect.signature(layer.call).parameters:
            if name.endswith("cache_update_index"):
                return _OwnCache(name.removesuffix("update_index").rstrip("_"), name)
    return None


def _padded(x: tf.Tensor, length: int) -> tf.Tensor:
    """Returns a tensor with zeros for positions that are yet to come."""
    rest = length - x.shape[1]
    return tf.pad(x, [[0, 0], [0, rest], *[[0, 0]] * (x.shape.rank - 2)])


def _changed(call: Call) -> ValueError:
    return ValueError(
        f"Layer '{call.layer.name}' calls other attention layers for one position than "
        "for all, so its keys and values cannot be stored. Received such a layer in "
        "`generate`. Give it an argument for its cache, such as `cache` with "
        "`cache_update_index`."
    )
