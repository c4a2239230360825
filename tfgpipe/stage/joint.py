"""The joint graph of a stage: forward and gradient as functions of explicit values.

Keras runs layers on variables; a pipeline needs them as a function of values, so that
every microbatch sees the weights of the start of the step, and a recomputation sees
the dropout seeds and statistics of the forward pass it repeats. `keras.StatelessScope`
gives that: inside it, reading a variable yields the value it was mapped to, and an
assignment only records the new value.

The layers are traced exactly once, and the gradient of every output with respect to
every input and weight in the same graph (a *joint graph*, as AOTAutograd has it). The
functions of a stage are subgraphs of it: see `graph.partitioner` and `functions`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe._util import IdentityMap, unique
from tfgpipe.capture import (
    TracingScope,
    is_differentiable,
    stack_losses,
)
from tfgpipe.distribution import ReplicaGroup
from tfgpipe.graph import joint_graph

ForwardFunction = Callable[[Sequence[tf.Tensor]], Mapping[Any, tf.Tensor | None]]


class CapturedVariablesError(Exception):
    """Layers have read variables that they were not given.

    Their values are constants in the graph, which is of no use therefore.

    Attributes:
        variables: The variables.
    """

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        super().__init__(f"Captured: {[variable.path for variable in variables]}.")
        self.variables = tuple(variables)


def trace_joint(
    body: ForwardFunction,
    *,
    input_specs: Sequence[tf.TensorSpec],
    weights: Sequence[keras.Variable],
    state: Sequence[keras.Variable],
    num_replicas: int = 1,
    non_differentiable: Collection[int] | None = (),
    shard_indices: IdentityMap[keras.Variable, int] | None = None,
) -> joint_graph.JointGraph:
    """Traces `body` with variables replaced by explicit values, and its gradient.

    Args:
        body: The stage's computation, from its inputs to its outputs by key; None for
            what was given and is taken away.
        input_specs: Shapes and types of the inputs of one microbatch.
        weights: The trainable variables that `body` reads.
        state: The other variables that it reads or assigns.
        num_replicas: Number of replicas to sum over.
        non_differentiable: Positions of inputs that want no gradient; None for no
            gradient of anything.
        shard_indices: Shard of each variable that is part of a weight.

    Raises:
        ValueError: If `body` assigns a variable that is in neither list, since that
            update would be lost.
        CapturedVariablesError: If it reads one that is in neither list.
    """
    build = functools.partial(
        _joint_graph,
        body,
        input_specs,
        weights,
        state,
        num_replicas=num_replicas,
        non_differentiable=non_differentiable,
        shard_indices=shard_indices or IdentityMap(),
    )
    # A stage's functions run on whatever device they are called on: none is named.
    with tf.device(None):
        return functions.trace_graph(build).rewritten({})


def _joint_graph(
    body: ForwardFunction,
    input_specs: Sequence[tf.TensorSpec],
    weights: Sequence[keras.Variable],
    state: Sequence[keras.Variable],
    *,
    num_replicas: int,
    non_differentiable: Collection[int] | None,
    shard_indices: IdentityMap[keras.Variable, int],
) -> joint_graph.JointGraph:
    """Builds the joint graph in the graph that is being traced."""
    variables = [*weights, *state]
    inputs = list(map(_placeholder, input_specs))
    values = list(map(_placeholder, variables))
    of_weights = values[: len(weights)]
    replicas, collective = _replicas(num_replicas)
    scope = TracingScope(zip(variables, values, strict=True), replicas)
    watched: list[tf.Tensor] = []
    if non_differentiable is not None:
        wanted = (x for i, x in enumerate(inputs) if i not in non_differentiable)
        watched += filter(is_differentiable, [*wanted, *of_weights])
    with tf.GradientTape() if watched else contextlib.nullcontext() as tape:
        if tape is not None:
            tape.watch(watched)
        made, loss = _run(body, inputs, scope, variables)
    accumulated, over_replicas = _merge(scope)
    forward = _forward_outputs(made, loss, scope, variables)
    outputs = [output for output in made.values() if output is not None]
    named = dict(zip(map(id, variables), _names(values), strict=True))
    given = joint_graph.StageInputs(
        inputs=_names(inputs),
        weights=_names(of_weights),
        state=_names(values[len(weights) :]),
        sums=tuple(named[id(v)] for v in variables if v.aggregation == "sum"),
        replicas=_names(collective),
    )
    shards = shard_indices.items()
    return joint_graph.JointGraph(
        graph=tf.compat.v1.get_default_graph(),
        edges={},
        captures={},
        given=given,
        forward=forward,
        backward=_differentiate(tape, outputs, loss, inputs, of_weights),
        accumulated=accumulated,
        num_collectives=next(replicas.instance_offsets) if replicas else 0,
        shard_indices={named[id(v)]: i for v, i in shards if id(v) in named},
        over_replicas=over_replicas,
    )


def trace_with_captured(
    trace: Callable[[], joint_graph.JointGraph], captured: list[keras.Variable]
) -> joint_graph.JointGraph:
    """Traces layers once more for each time that they turn out to capture variables.

    Args:
        trace: Traces them.
        captured: The variables of other layers that they read, which `trace` looks up.
    """
    while True:
        try:
            return trace()
        except CapturedVariablesError as error:
            captured += error.variables


def _replicas(num_replicas: int) -> tuple[ReplicaGroup | None, list[tf.Tensor]]:
    """Returns the replicas to sum over, if any, and what is given to that end."""
    if num_replicas == 1:
        return None, []
    parts = list(map(_placeholder, ReplicaGroup.specs()))
    return ReplicaGroup(num_replicas, *parts), parts


def _run(
    body: ForwardFunction,
    inputs: Sequence[tf.Tensor],
    scope: TracingScope,
    variables: Sequence[keras.Variable],
) -> tuple[Mapping[Any, tf.Tensor | None], tf.Tensor | None]:
    """Returns the outputs of a stage, and the losses that its layers add, `[n]`."""
    with scope:
        made = body(inputs)
    scope.check_assignments(variables)
    if scope.captured_variables:
        raise CapturedVariablesError(unique(scope.captured_variables))
    return made, stack_losses(scope.losses)


def _forward_outputs(
    made: Mapping[Any, tf.Tensor | None],
    loss: tf.Tensor | None,
    scope: TracingScope,
    variables: Sequence[keras.Variable],
) -> joint_graph.ForwardOutputs:
    """Returns the signature of the forward, before its gradient is in the graph."""
    outputs = {key: output for key, output in made.items() if output is not None}
    operations = tf.compat.v1.get_default_graph().get_operations()
    return joint_graph.ForwardOutputs(
        keys=tuple(outputs),
        outputs=_names(outputs.values()),
        dropped=tuple(key for key, output in made.items() if output is None),
        new_values=_names(map(scope.get_current_value, variables)),
        loss=_name(loss),
        loss_calls=tuple(scope.loss_calls),
        side_effects=tuple(op.name for op in operations if op.op_def.is_stateful),
    )


def _merge(
    scope: TracingScope,
) -> tuple[tuple[joint_graph.Accumulation, ...], tuple[str, ...]]:
    """Returns the merged accumulators, and the new values that all replicas share."""
    alike = [scope.get_current_value(variable) for variable in scope.over_replicas]
    accumulated = []
    for accumulator in scope.accumulators:
        before = list(map(_placeholder, accumulator.values))
        after = accumulator.merge(before)
        accumulated.append(
            joint_graph.Accumulation(accumulator, _names(before), _names(after))
        )
        alike += after if accumulator.over_replicas else []
    return tuple(accumulated), _names(alike)


def _differentiate(
    tape: tf.GradientTape | None,
    outputs: Sequence[tf.Tensor],
    loss: tf.Tensor | None,
    inputs: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
) -> joint_graph.BackwardSignature:
    """Adds the gradients of inputs and weights by those of outputs and losses."""
    targets = [*outputs, *joint_graph.not_none(loss)]
    fed = [_placeholder(x) if tape and is_differentiable(x) else None for x in targets]
    pairs = [(x, dx) for x, dx in zip(targets, fed, strict=True) if dx is not None]
    gradients = [None] * (len(inputs) + len(weights))
    if tape and pairs:
        wanted, output_gradients = map(list, zip(*pairs, strict=True))
        gradients = tape.gradient(
            wanted, [*inputs, *weights], output_gradients=output_gradients
        )
    of_inputs = gradients[: len(inputs)]
    return joint_graph.BackwardSignature(
        output_grads=_names(fed[: len(outputs)]),
        loss_grad=None if loss is None else _name(fed[-1]),
        input_grads=_names(
            None if dx is None else tf.convert_to_tensor(dx) for dx in of_inputs
        ),
        weight_grads=tuple(map(_gradient_names, gradients[len(inputs) :])),
    )


def _gradient_names(
    gradient: tf.Tensor | tf.IndexedSlices | None,
) -> joint_graph.GradientNames | None:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return joint_graph.GradientNames(gradient.values.name, gradient.indices.name)
    return joint_graph.GradientNames(gradient.name)


def _name(tensor: tf.Tensor | None) -> Any:
    return None if tensor is None else tensor.name


def _names(tensors: Iterable[tf.Tensor | None]) -> tuple[Any, ...]:
    return tuple(map(_name, tensors))


def _placeholder(like: tf.Tensor | tf.TensorSpec | keras.Variable) -> tf.Tensor:
    return tf.compat.v1.placeholder(like.dtype, like.shape)
