"""Records the `call` of a model on symbolic tensors, as a Functional model.

Where a model's `call` consists of layers and `keras.ops`, Keras remembers what is
applied to symbolic tensors. Python's control flow is followed as it goes for what is
known: sizes, settings, numbers of layers. Layers stay whole, whatever they do inside.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap, argument_checks, first_names

# Where errors come from that are not of the user's code.
_LIBRARIES = tuple(
    str(Path(sys.modules[name].__file__ or "").parent)
    for name in ("keras", "tensorflow", "tfgpipe")
)
# Characters of an error that a message quotes.
_MOST_TEXT = 300


def functional(model: keras.Model, sample: Any) -> keras.Model:
    """Returns a Functional model of the layers that a model's `call` applies.

    The layers, and so the weights, are shared. It is for a model that is written as a
    subclass of `keras.Model`, of which a pipeline needs to know the calls. A layer that
    uses operations of TensorFlow stays whole.

    Example:

    >>> class Net(keras.Model):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.blocks = [keras.layers.Dense(8, "relu") for _ in range(3)]
    ...     def call(self, x):
    ...         for block in self.blocks:
    ...             x = x + block(x)
    ...         return x
    >>> x = np.ones((16, 8), "float32")
    >>> model = tfgpipe.functional(Net(), x)
    >>> pipelined = tfgpipe.pipeline(model, num_stages=3, num_microbatches=4)
    >>> pipelined(x).shape
    TensorShape([16, 8])

    Args:
        model: The model. If it is not built, it becomes so.
        sample: A mini-batch as the model takes it, of which shapes and types count.

    Raises:
        TypeError: If its `call` cannot be recorded; the line of it is named.
        ValueError: If its `call` goes another way in training, or applies a layer with
            weights to nothing that depends on the inputs.
    """
    argument_checks.check_instance("model", model, keras.Model)
    if keras_internals.functional.functional_graph(model) is not None:
        return model
    inputs = keras.tree.map_structure(lambda x: _input(model, x), sample)
    with _naming_lines(model):
        model(inputs)  # Builds it, as a call on data does.
    graphs = {mode: _recorded(model, inputs, mode) for mode in (None, True, False)}
    calls = {mode: _calls(graph) for mode, graph in graphs.items()}
    if not calls[None] == calls[True] == calls[False]:
        raise ValueError(
            "A pipeline runs the same layers in training and in inference. Received "
            f"'{model.name}' of type {type(model).__name__}, whose `call` applies "
            f"{_difference(calls[True], calls[False])}. Put what depends on `training` "
            "into a layer."
        )
    _check_weights(model, graphs[None])
    return graphs[None]


def _check_weights(model: keras.Model, graph: keras.Model) -> None:
    """Raises ValueError if a trainable weight is in no call of the graph."""
    read = [
        x
        for node in keras_internals.functional.nodes(graph)
        for x in keras.tree.flatten((node.args, node.kwargs))
        if isinstance(x, keras.Variable)
    ]
    known = IdentityMap((v, None) for v in (*graph.variables, *read))
    lacking = [v.path for v in model.trainable_variables if v not in known]
    if lacking:
        raise ValueError(
            "A pipeline trains the weights of the layers that `call` applies to its "
            f"inputs. Received '{model.name}' of type {type(model).__name__}, whose "
            f"{first_names(lacking)} it does not, as of a layer that is called on a "
            "constant, such as a range of positions. Make the constant of an input, as "
            "`keras.ops.cumsum(keras.ops.ones_like(x), axis=1) - 1`; or, if it is not "
            "used, set `trainable = False` on the layer."
        )


def _input(model: keras.Model, leaf: Any) -> keras.KerasTensor:
    """Returns a symbolic tensor like a part of a sample, for any batch size.

    Of floats it has the type to which a call of the model casts them.
    """
    if not isinstance(leaf, keras.KerasTensor):
        leaf = tf.convert_to_tensor(leaf)
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    if model.autocast and keras.backend.is_float_dtype(dtype):
        dtype = model.input_dtype
    return keras.Input(tuple(leaf.shape[1:]), dtype=dtype)


def _recorded(model: keras.Model, inputs: Any, training: bool | None) -> keras.Model:
    """Returns a Functional model of the calls in a mode."""
    arguments: dict[str, Any] = {}
    if "training" in inspect.signature(model.call).parameters:
        arguments["training"] = training
    with _naming_lines(model):
        outputs = model.call(inputs, **arguments)
        return keras.Model(inputs, outputs, name=model.name)


def _calls(graph: keras.Model) -> list[tuple[str, int | None]]:
    """Returns the kinds of operations in a graph, and which layers they are."""
    return [
        (
            type(node.operation).__name__,
            id(node.operation) if isinstance(node.operation, keras.Layer) else None,
        )
        for node in keras_internals.functional.nodes(graph)
    ]


def _difference(some: list[Any], others: list[Any]) -> str:
    """Says by which calls the graphs of two modes differ."""
    pairs = zip([*some, ("nothing",)], [*others, ("nothing",)], strict=False)
    first = next(((a[0], b[0]) for a, b in pairs if a != b), ("more", "less"))
    return f"{first[0]} in training where it applies {first[1]} in inference"


@contextlib.contextmanager
def _naming_lines(model: keras.Model) -> Iterator[None]:
    """Errors inside are told with the line of the user's file they come from."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())[:_MOST_TEXT]
        raise TypeError(
            "A pipeline records the `call` of a model on symbolic tensors. Received "
            f"'{model.name}' of type {type(model).__name__}, whose `call` fails at "
            f"{_line(error)}: {type(error).__name__}: {text} Use "
            "`keras.ops` there, or put what needs tensors into a layer, which stays "
            "whole."
        ) from error


def _line(error: BaseException) -> str:
    """Returns the line of the user's code that an error comes from."""
    frames: list[traceback.FrameSummary] = []
    cause: BaseException | None = error
    while cause is not None:  # Keras may have raised another one of it.
        found = traceback.extract_tb(cause.__traceback__)
        own = [x for x in found if not x.filename.startswith(_LIBRARIES)]
        frames = own or frames or list(found)
        cause = cause.__cause__ or cause.__context__
    frame = frames[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}, `{frame.line}`"
