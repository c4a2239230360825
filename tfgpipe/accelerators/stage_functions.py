"""The stage functions of a step, compiled for another device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.accelerators.compilers import Compiled, Compiler
from tfgpipe.accelerators.hlo import hlo
from tfgpipe.accelerators.platforms import Platform
from tfgpipe.accelerators.steps import Step
from tfgpipe.stage import owned_variables

# In-place operations, which XLA has no need of, and what it has instead.
_IN_PLACE = {
    "InplaceAdd": tf.raw_ops.TensorScatterAdd,
    "InplaceUpdate": tf.raw_ops.TensorScatterUpdate,
}


def compile_stage_functions(
    step: Step, names: Sequence[str], platform: Platform
) -> dict[str, Compiled]:
    """Returns what a compiler says of the functions of a step, by their names.

    Args:
        step: The step.
        names: Names of functions of its graph.
        platform: What to compile for.
    """
    graphs = functions.graphs_of_functions(step.graph.as_graph_def().library)
    with Compiler(platform) as compiler:
        return {
            name: _compile(compiler, _call_of(graphs[name]), graphs[name].inputs)
            for name in dict.fromkeys(names)
        }


def compile_updates(step: Step, platform: Platform) -> dict[int, Compiled]:
    """Returns what a compiler says of the optimizer's update, by the index of a stage.

    Args:
        step: The step.
        platform: What to compile for.
    """
    with Compiler(platform) as compiler:
        return {
            k: _compile(compiler, _update_of(step.model.optimizer, weights), weights)
            for k, weights in _trained(step)
        }


def _trained(step: Step) -> Iterator[tuple[int, list[keras.Variable]]]:
    """Yields each stage with the variables that it owns and trains, if any."""
    trained = {id(v) for v in step.model.trainable_variables}
    for stage, owned in owned_variables(step.pipeline.stages):
        variables = [v for v in owned if id(v) in trained]
        if variables:
            yield stage.index, variables


def _update_of(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]
) -> Callable[..., None]:
    """Returns the update of copies of weights, all on one device, from gradients."""
    with tf.device("CPU:0"):
        copies = [
            keras.Variable("zeros", shape=v.shape, dtype=v.dtype) for v in weights
        ]
        config = keras.optimizers.serialize(optimizer)
        other = keras.optimizers.deserialize(config)
        other.build(copies)

    def update(*gradients: tf.Tensor) -> None:
        other.apply(list(gradients), copies)

    return update


def _compile(
    compiler: Compiler, function: Callable[..., Any], arguments: Sequence[Any]
) -> Compiled:
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in arguments]
    try:
        return compiler.compile(hlo(function, *specs))
    except ValueError as error:
        return Compiled(seconds=0.0, error=str(error))


def _call_of(graph: tf.Graph) -> Callable[..., list[tf.Tensor]]:
    """Returns a function that computes what a graph does, without in-place operations.

    Args:
        graph: One of `functions.graphs_of_functions`.
    """

    def call(*tensors: tf.Tensor) -> list[tf.Tensor]:
        made = dict(zip((x.ref() for x in graph.inputs), tensors, strict=True))
        segment: list[tf.Operation] = []
        for op in graph.get_operations():
            if op.type in _IN_PLACE:
                _import(segment, made)
                segment = []
                x, i, v = (made[each.ref()] for each in op.inputs)
                made[op.outputs[0].ref()] = _IN_PLACE[op.type](
                    tensor=x, indices=tf.reshape(i, [-1, 1]), updates=v
                )
            elif op.type != "Placeholder":
                segment.append(op)
        _import(segment, made)
        return [made[x.ref()] for x in graph.outputs]

    return call


def _import(operations: Sequence[tf.Operation], made: dict[Any, tf.Tensor]) -> None:
    """Adds operations to the current graph.

    Args:
        operations: Operations of another graph, in its order.
        made: The tensors of the current graph for those of the other, to add to.
    """
    if not operations:
        return
    known = {op.name for op in operations}
    graph_def = tf.compat.v1.GraphDef(
        node=[_among(op.node_def, known) for op in operations],
        library=operations[0].graph.as_graph_def().library,
    )
    inputs = {
        x.name: made[x.ref()]
        for op in operations
        for x in op.inputs
        if x.op.name not in known
    }
    wanted = [x for op in operations for x in op.outputs]
    found = tf.graph_util.import_graph_def(
        graph_def,
        input_map=inputs,
        return_elements=[x.name for x in wanted],
        name="",
    )
    made.update(zip((x.ref() for x in wanted), found, strict=True))


def _among(node: Any, known: set[str]) -> Any:
    """Returns a node that waits for none but known ones: the order is theirs here."""
    for name in [x for x in node.input if x.startswith("^") and x[1:] not in known]:
        node.input.remove(name)
    return node
