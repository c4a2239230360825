"""The graph of a Functional model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional


@dataclasses.dataclass(frozen=True)
class Node:
    """One call in the graph of a Functional model.

    Attributes:
        operation: The layer or operation called.
        args: Its positional arguments, symbolic tensors in any structure.
        kwargs: Its keyword arguments.
        inputs: The symbolic tensors among the arguments.
        outputs: The symbolic tensors it returned, in flat order.
    """

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: Sequence[keras.KerasTensor]
    outputs: Sequence[keras.KerasTensor]


def functional_graph(layer: Any) -> keras.Model | None:
    """Returns the Functional model that a call of `layer` runs and nothing else.

    None for layers that are no models, models that are not built, and models with a
    `call` of their own. The Functional model of a Sequential one is private.
    """
    if isinstance(layer, keras.Sequential):
        if type(layer).call is not keras.Sequential.call:
            return None
        layer = layer._functional
    own = isinstance(layer, Functional) and type(layer).call is Functional.call
    return layer if own else None


def nodes(graph: keras.Model) -> Iterator[Node]:
    """Yields the calls of a Functional model in the order in which Keras runs them.

    Keras' public list of a model's operations lacks their arguments.
    """
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if node.operation and not node.is_input:
                yield Node(
                    node.operation,
                    node.arguments.args,
                    node.arguments.kwargs,
                    node.input_tensors,
                    node.outputs,
                )


def standardize_inputs(graph: keras.Model, inputs: Any) -> list[tf.Tensor | None]:
    """Returns the inputs of a Functional model as it feeds them to its graph.

    In flat order, of the right type and rank, masks still on them. Only a call of the
    whole model does this publicly.
    """
    return graph._standardize_inputs(inputs)
