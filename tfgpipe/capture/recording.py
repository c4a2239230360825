"""Records the `call` of a model on symbolic tensors, as a Functional model.

Where a model's `call` consists of layers and `keras.ops`, Keras remembers what is
applied to symbolic tensors. Python's control flow is followed as it goes for what is
known: sizes, settings, numbers of layers. Layers stay whole, whatever they do inside,
unless more calls are asked for: then what a layer's own `call` applies is recorded too.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap, argument_checks, first_names
from tfgpipe.capture import tracer

# Where errors come from that are not of the user's code.
_LIBRARIES = tuple(
    str(Path(sys.modules[name].__file__ or "").parent)
    for name in ("keras", "tensorflow", "tfgpipe")
)
# Characters of an error that a message quotes.
_MOST_TEXT = 300


class _ModesDifferError(ValueError):
    """A `call` applies other layers in training than in inference."""


def functional(
    model: keras.Model, sample: Any = None, *, num_calls: int = 1
) -> keras.Model:
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
        sample: A mini-batch as the model takes it, of which shapes and types count. A
            Functional model needs none.
        num_calls: Number of calls to have at least: until there are as many, layers
            with a `call` of their own are opened, where that can be recorded, level by
            level. Those with weights of their own, a regularizer of activities, or
            masks on what they are given stay whole.

    Raises:
        TypeError: If its `call` cannot be recorded; the line of it is named.
        ValueError: If its `call` goes another way in training, or applies a layer with
            weights to nothing that depends on the inputs.
    """
    argument_checks.check_instance("model", model, keras.Model)
    argument_checks.check_count("num_calls", num_calls)
    if keras_internals.functional.functional_graph(model) is not None:
        return _with_calls(model, num_calls)
    inputs = keras.tree.map_structure(lambda x: _input(model, x), sample)
    with _naming_lines(model):
        model(inputs)  # Builds it, as a call on data does.
        graph = _recorded(model, (inputs,), {})
    _check_weights(model, graph)
    return _with_calls(graph, num_calls)


def _with_calls(graph: keras.Model, num_calls: int) -> keras.Model:
    """Returns a Functional model of so many calls, or as many as there can be.

    Warns of layers that stay whole where there are fewer.
    """
    whole: dict[str, str] = {}
    while len(tracer.capture_functional(graph).graph.calls) < num_calls:
        more = _opened(graph, whole)
        if more is not None:
            graph = more
            continue
        for name, reason in whole.items():
            warnings.warn(
                f"Layer '{name}' stays whole, since {reason}. Received num_calls="
                f"{num_calls}.",
                stacklevel=3,
            )
        break
    return graph


def _opened(graph: keras.Model, whole: dict[str, str]) -> keras.Model | None:
    """Returns a graph in place of whose layers with a `call` are those inside.

    None if there is none that can be recorded.

    Args:
        graph: The graph.
        whole: By the name of a layer that stays whole, why. Added to.
    """
    inputs = keras.tree.map_structure(_like, graph.input)
    pairs = zip(graph.inputs, keras.tree.flatten(inputs), strict=True)
    values: IdentityMap[Any, Any] = IdentityMap(pairs)

    def value(leaf: Any) -> Any:
        return values[leaf] if isinstance(leaf, keras.KerasTensor) else leaf

    is_opened = False
    for node in keras_internals.functional.nodes(graph):
        if any(x not in values for x in node.inputs):
            continue  # Belongs to another model that shares the layer.
        args, kwargs = keras.tree.map_structure(value, (node.args, node.kwargs))
        operation = node.operation
        inner = _inside(operation, args, kwargs, whole)
        if inner is not None:
            is_opened = True
            if keras_internals.functional.functional_graph(operation) is None:
                args, kwargs = (_inputs(args),), {}
            operation = inner
        outputs = keras.tree.flatten(operation(*args, **kwargs))
        values.update(zip(node.outputs, outputs, strict=True))
    if not is_opened:
        return None
    outputs = keras.tree.map_structure(value, graph.output)
    return keras.Model(inputs, outputs, name=graph.name)


def _inside(
    layer: Any, args: Any, kwargs: Mapping[str, Any], whole: dict[str, str]
) -> keras.Model | None:
    """Returns the calls inside a layer's call as a model; None if it stays whole.

    A call does more than `call`: it casts, to the model's type here, and handles masks,
    regularizers and weights of its own, which such layers have none of.
    """
    known = keras_internals.functional.functional_graph(layer)
    if known is not None:
        return _opened(known, whole)
    inner = keras_internals.layers.inner_layers(layer)
    if len(inner) <= 1 or type(layer).__module__.startswith("keras."):
        return None
    masks = (keras_internals.calls.get_mask(x) for x in _tensors(args))
    for is_so, reason in (
        (layer.activity_regularizer is not None, "it regularizes its activity"),
        (_has_own_variables(layer), "it has variables of its own"),
        (any(name != "training" for name in kwargs), "it takes keyword arguments"),
        (any(mask is not None for mask in masks), "it is given a mask"),
    ):
        if is_so:
            whole[layer.name] = reason
            return None
    inputs = keras.tree.map_structure(
        lambda x: _like(x) if isinstance(x, keras.KerasTensor) else x, args
    )
    try:
        graph = _recorded(layer, inputs, {"dtype": layer.dtype_policy})
        _check_weights(layer, graph)
    except Exception as error:  # Whatever it does that takes tensors.
        whole[layer.name] = f"its `call` cannot be recorded at {_described(error)}"
        return None
    return graph


def _has_own_variables(layer: keras.Layer) -> bool:
    """Returns whether a layer has variables that no layer inside it has."""
    _, *inner = keras_internals.layers.inner_layers(layer)
    theirs = IdentityMap((v, None) for x in inner for v in x.variables)
    return any(v not in theirs for v in layer.variables)


def _tensors(structure: Any) -> list[keras.KerasTensor]:
    leaves = keras.tree.flatten(structure)
    return [x for x in leaves if isinstance(x, keras.KerasTensor)]


def _inputs(args: Any) -> Any:
    """Returns the only argument, if it holds tensors alone, or a list of tensors."""
    tensors = _tensors(args)
    only = len(args) == 1 and len(tensors) == len(keras.tree.flatten(args))
    return args[0] if only else tensors


def _like(tensor: keras.KerasTensor) -> keras.KerasTensor:
    return keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype)


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


def _recorded(layer: Any, args: Any, options: Mapping[str, Any]) -> keras.Model:
    """Returns a Functional model of the calls of a layer's `call`.

    Args:
        layer: The layer or model.
        args: Its arguments, with inputs for tensors.
        options: Options of the Functional model.

    Raises:
        _ModesDifferError: If they are others in training.
    """
    graphs = {}
    takes_mode = "training" in inspect.signature(layer.call).parameters
    for mode in (None, True, False):
        outputs = layer.call(*args, **({"training": mode} if takes_mode else {}))
        graphs[mode] = keras.Model(_inputs(args), outputs, name=layer.name, **options)
    calls = {mode: _calls(graph) for mode, graph in graphs.items()}
    if not calls[None] == calls[True] == calls[False]:
        raise _ModesDifferError(
            "A pipeline runs the same layers in training and in inference. Received "
            f"'{layer.name}' of type {type(layer).__name__}, whose `call` applies "
            f"{_difference(calls[True], calls[False])}. Put what depends on `training` "
            "into a layer."
        )
    return graphs[None]


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
    """Errors inside name the line of the user's file that they come from."""
    try:
        yield
    except _ModesDifferError:
        raise
    except Exception as error:
        raise TypeError(
            "A pipeline records the `call` of a model on symbolic tensors. Received "
            f"'{model.name}' of type {type(model).__name__}, whose `call` fails at "
            f"{_described(error)} Use "
            "`keras.ops` there, or put what needs tensors into a layer, which stays "
            "whole."
        ) from error


def _described(error: BaseException) -> str:
    """Returns the line of the user's code that an error comes from, and its text."""
    frames: list[traceback.FrameSummary] = []
    cause: BaseException | None = error
    while cause is not None:  # Keras may have raised another one of it.
        found = traceback.extract_tb(cause.__traceback__)
        own = [x for x in found if not x.filename.startswith(_LIBRARIES)]
        frames = own or frames or list(found)
        cause = cause.__cause__ or cause.__context__
    frame, text = frames[-1], " ".join(str(error).split())[:_MOST_TEXT]
    return (
        f"{Path(frame.filename).name}, line {frame.lineno}, `{frame.line}`: "
        f"{type(error).__name__}: {text}"
    )
