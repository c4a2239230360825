"""Structural deduplication: which segments of a model compute the same.

A deep model is mostly one block, many times over. Tracing a block takes TensorFlow a
tenth of a second and more, and reading its configuration a thousandth. So segments
whose calls are of layers of one class and one configuration share one trace.

A configuration decides only where it is known to be all that a layer computes by. Of
Keras' own layers it is, but for `Lambda` and preprocessing layers, which learn of data.
Any other class says so itself:

    class Block(keras.layers.Layer):
        config_is_complete = True

It promises that layers of this class with equal `get_config()` and inputs compute the
same on equal variables. Names do not count. A subclass does not inherit the promise,
since it may compute by more. A segment with any other layer, or with a function or an
object in a configuration, is traced by itself.
"""

from __future__ import annotations

import hashlib
import itertools
import types
import warnings
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap
from tfgpipe.capture import Segment, Value

# What only makes variables, in layers of Keras.
_INITIALIZER_KEYS = ("initializer", "seed")
# Methods that Keras puts functions of its own around.
_WRAPPED_METHODS = ("build", "quantize")


def structure(segment: Segment) -> Hashable | None:
    """Returns a key that is equal for segments that share a trace; None if unknown."""
    try:
        return _segment_key(segment)
    except _NotDescribableError:
        return None


def layer_structure(layer: keras.layers.Layer) -> Hashable | None:
    """Returns a key that is equal for built layers that compute the same.

    That is, on equal inputs and equal values of their variables. None if unknown.
    """
    try:
        return (_layer_key(layer), _layers_variables_key([layer]))
    except _NotDescribableError:
        return None


def value_ids(segment: Segment) -> tuple[int, ...]:
    """Returns the ids of a segment's values, in an order that its structure decides."""
    outputs = (value_id for call in segment.calls for value_id in call.output_ids)
    return tuple(dict.fromkeys((*segment.input_ids, *outputs)))


class _NotDescribableError(Exception):
    """The configurations do not tell what a segment computes."""


def _segment_key(segment: Segment) -> Hashable:
    order = {value_id: i for i, value_id in enumerate(value_ids(segment))}
    positions = IdentityMap((layer, i) for i, layer in enumerate(segment.layers))
    calls = []
    for call in segment.calls:
        arguments = (call.args, dict(call.kwargs))
        nesting = keras.tree.map_structure(lambda _: None, arguments)
        leaves = tuple(
            ("value", order[leaf.id]) if isinstance(leaf, Value) else _hashable(leaf)
            for leaf in keras.tree.flatten(arguments)
        )
        outputs = tuple(order[n] for n in call.output_ids)
        read = call.read_losses, order.get(call.batch_id)
        calls.append((positions[call.layer], repr(nesting), leaves, outputs, read))
    return (
        tuple(map(_layer_key, segment.layers)),
        _layers_variables_key(segment.layers),
        tuple(calls),
        tuple(order[n] for n in segment.input_ids),
        tuple(order[n] for n in segment.output_ids),
    )


def _layers_variables_key(layers: Iterable[Any]) -> Hashable:
    """Describes the variables of each layer; the same variable has the same index."""
    indices: IdentityMap[keras.Variable, int] = IdentityMap()
    return tuple(
        tuple(
            (indices.setdefault(v, len(indices)), tuple(v.shape), v.dtype, v.trainable)
            for v in itertools.chain(
                layer.trainable_variables, layer.non_trainable_variables
            )
        )
        for layer in layers
        if isinstance(layer, keras.layers.Layer)
    )


def _layer_key(layer: Any) -> Hashable:
    """Describes a layer and each layer inside it, or a Keras operation."""
    inner = keras_internals.layers.inner_layers(layer) or [layer]
    if not all(map(_is_complete, inner)):
        raise _NotDescribableError
    classes = {(type(x).__module__, type(x).__name__) for x in inner}
    return tuple((type(x), *_configuration(x, classes)) for x in inner)


def _is_complete(layer: Any) -> bool:
    """Returns whether a layer computes by its configuration alone."""
    # Of an activation of the user's, a configuration has the name at most.
    if any(map(_is_user_function, vars(layer).items())):
        return False
    declared = vars(type(layer)).get("config_is_complete", False)
    return bool(declared) or keras_internals.layers.config_is_complete(layer)


def _is_user_function(attribute: tuple[str, Any]) -> bool:
    name, value = attribute
    if name in _WRAPPED_METHODS or not isinstance(value, types.FunctionType):
        return False
    return not str(value.__module__).startswith("keras.")


def _configuration(layer: Any, classes: Collection[tuple[str, str]]) -> list[Hashable]:
    try:
        # Keras warns of lambdas in a configuration, which makes it unknown anyway.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = layer.get_config()
    except Exception as error:  # Whatever a `get_config` that is broken raises.
        raise _NotDescribableError from error
    is_keras = keras_internals.layers.config_is_complete(layer)
    described = [_hashable(_call_config(config, is_keras=is_keras), classes)]
    if isinstance(layer, keras.layers.Layer):
        shapes = layer.get_build_config()
        described += [_hashable(shapes), layer.trainable, layer.autocast]
    return described


def _call_config(config: Mapping[str, Any], *, is_keras: bool) -> dict[str, Any]:
    """Returns the part of a layer's configuration that its `call` may depend on."""
    return {
        key: value
        for key, value in config.items()
        if key != "name" and not (is_keras and key.endswith(_INITIALIZER_KEYS))
    }


def _hashable(x: Any, classes: Collection[tuple[str, str]] = ()) -> Hashable:
    """Describes a value of numbers and text.

    Args:
        x: The value.
        classes: Module and name of the classes of layers that are described besides.

    Raises:
        _NotDescribableError: If it holds anything else.
    """
    if x is None or isinstance(x, bool | int | float | complex | str | bytes):
        return (type(x), repr(x))
    if isinstance(x, tf.DType | np.dtype | np.generic | tf.TensorShape | type(...)):
        return (type(x), repr(x))
    if isinstance(x, slice):
        return (slice, *(_hashable(i, classes) for i in (x.start, x.stop, x.step)))
    if isinstance(x, np.ndarray) and x.dtype != object:
        digest = hashlib.sha256(x.tobytes()).digest()
        return ("array", str(x.dtype), x.shape, digest)
    if isinstance(x, tuple | list):
        return (type(x), *(_hashable(i, classes) for i in x))
    if isinstance(x, dict):
        if "class_name" in x:
            x = _serialized(x, classes)
        items = ((_hashable(k), _hashable(v, classes)) for k, v in x.items())
        return (type(x), *items)
    raise _NotDescribableError


def _serialized(
    x: dict[str, Any], classes: Collection[tuple[str, str]]
) -> dict[str, Any]:
    """Returns the part that counts of an object that Keras has serialized.

    Of Keras' own it is the configuration. So it is of layers, which are described by
    themselves as well. Of anything else, as of functions, there may be more to it.
    """
    module = str(x.get("module"))
    is_keras = f"{module}.".startswith("keras.") and x.get("registered_name") is None
    # Counts objects while Keras saves or loads a model.
    x = {key: value for key, value in x.items() if key != "shared_object_id"}
    if is_keras and module != "keras.layers":
        return x
    if not is_keras and (module, x["class_name"]) not in classes:
        raise _NotDescribableError
    return {**x, "config": _call_config(x["config"], is_keras=is_keras)}
