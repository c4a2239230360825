"""Whether layers treat the rows of a batch one by one, as a pipeline has to assume.

Of each kind of layer one is tried: on a number of rows that stands out, to see whether
that number comes out again, and on a few rows of which one then changes, to see whether
the results for the others stay.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import examples, program
from tfgpipe.network import Part
from tfgpipe.programs import Programs
from tfgpipe.recording import Recording
from tfgpipe.replay import Replay, Wire, layer_variables
from tfgpipe.trace import Trace, trace

# Rows that no layer is likely to make out of another dimension: a prime.
_MANY = 8191
# Rows to compare results on.
_FEW = 5
# Numbers in the weights of a layer that are not too many to make up: 64 MiB.
_MOST_WEIGHTS = 2**24


def check(recorded: Recording, *, num_microbatches: int) -> None:
    """Refuses layers that change the number of rows; warns of those that mix them.

    Keras' own layers keep rows, and apart, but for batch normalisation. Of other layers
    one of each kind is traced.

    Args:
        recorded: The model, on symbolic tensors.
        num_microbatches: M. With one microbatch rows may mix.

    Raises:
        ValueError: If a layer's output has another number of rows than its input.
    """
    network, specs = recorded.network, recorded.specs
    seen: set[Hashable] = set()
    for position, call in enumerate(network.calls):
        given = [specs[number] for number in call.reads]
        made = [specs[number] for number in call.makes]
        _check_number(call.layer.name, given[0].shape, [x.shape for x in made])
        kind = _kind(call.layer, given)
        if kind is None or kind in seen:
            continue
        seen.add(kind)
        part = network.part(slice(position, position + 1))
        traced = _trace(part, given, _MANY)
        shapes = [traced.spec(name).shape for name in traced.outputs]
        _check_number(call.layer.name, (_MANY, *given[0].shape[1:]), shapes)
        if num_microbatches > 1 and _mixes(part, given):
            warnings.warn(
                f"Layer '{call.layer.name}' mixes the rows of a batch, and in a "
                "pipeline it sees one microbatch at a time: its results differ from "
                "those of the unpipelined model. Keep it outside the pipeline, or use "
                "`num_microbatches=1`.",
                stacklevel=2,
            )


def _check_number(name: str, given: Sequence[Any], made: Sequence[Any]) -> None:
    for shape in made:
        if not len(shape) or shape[0] != given[0]:
            raise ValueError(
                "Every layer in a pipeline must keep the batch dimension, since it "
                f"sees only one microbatch at a time. Layer '{name}' maps shape "
                f"{tuple(given)} to {tuple(shape)}. Keep the layer outside the "
                "pipeline."
            )


def _kind(layer: Any, inputs: Sequence[keras.KerasTensor]) -> Hashable:
    """Returns what layers that treat rows alike have in common.

    None for Keras' own layers.
    """
    if isinstance(layer, keras.layers.Lambda | keras.Model):
        return id(layer)  # May hold anything.
    if not isinstance(layer, keras.layers.Layer):
        return id(layer)  # An operation, such as a mean over any axis.
    if type(layer).__module__.startswith("keras."):
        return None
    try:
        config = {**layer.get_config(), "name": None}
    except NotImplementedError:  # A layer need not have one.
        config = {}
    shapes = tuple((x.shape[1:], x.dtype) for x in inputs)
    return (type(layer), shapes, repr(config))


def _trace(part: Part, inputs: Sequence[keras.KerasTensor], rows: int) -> Trace:
    """Traces a call in inference. What mixes in training alone normalises batches."""
    wires = [Wire(number) for number in part.reads]
    replay = Replay(part, wires, training=False, per_layer=False)
    weights, state = layer_variables(part.layers)
    specs = [tf.TensorSpec((rows, *x.shape[1:]), x.dtype) for x in inputs]
    return trace(replay.body, input_specs=specs, weights=weights, state=state)


def _mixes(part: Part, inputs: Sequence[keras.KerasTensor]) -> bool:
    """Returns whether another first row changes results for the rows after it.

    A call that does more than compute (prints, draws at random) is not tried, nor one
    of very many weights, and one that rejects noise has no result to compare.
    """
    variables = [v for some in layer_variables(part.layers) for v in some]
    if sum(math.prod(v.shape) for v in variables) > _MOST_WEIGHTS:
        return False
    traced = _trace(part, inputs, _FEW)
    if traced.effects:
        return False
    options = program.Options(saves=False, may_be_empty=False, jit_compile=False)
    programs = Programs(traced, options, {})
    forward = programs.forward
    lasting = tuple(name for name in programs.lasting if name in forward.feeds)

    def rest(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
        names = (*traced.inputs, *traced.weights, *traced.state)
        values = [*tensors, *map(examples.variable_value, variables)]
        given = dict(zip(names, values, strict=True))
        if lasting:
            given.update(programs.once(lasting)(given)[0])
        made, _ = forward(given)
        return [made[n][1:].numpy() for n in traced.outputs if n in made]

    with tf.init_scope(), contextlib.suppress(tf.errors.OpError):
        before = [
            examples.tensor(traced.spec(name), unknown_size=_FEW)
            for name in traced.inputs
        ]
        after = [tf.concat([_other(x[:1]), x[1:]], axis=0) for x in before]
        pairs = zip(rest(before), rest(after), strict=True)
        return not all(
            np.allclose(a, b, rtol=1e-2, atol=1e-2, equal_nan=True) for a, b in pairs
        )
    return False


def _other(row: tf.Tensor) -> tf.Tensor:
    """Returns another row of the same type."""
    if row.dtype.is_bool:
        return tf.logical_not(row)
    return 5 * row + 1 if row.dtype.is_floating else row + 1
