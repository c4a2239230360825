"""One stage, forward and gradient together, as a graph of explicit values.

Keras runs layers on variables; a pipeline needs them as a function of values, so that
every microbatch sees the weights of the start of the step, and a recomputation sees
the dropout seeds and statistics of the forward pass it repeats. `keras.StatelessScope`
gives that: inside it, reading a variable yields the value it was mapped to, and an
assignment only notes the new value.

The layers are traced exactly once, and the gradient of every output with respect to
every input and weight in the same graph. `cut` and `program` then take it apart.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.capture import Accumulator, Scope, check_assignments, differentiable
from tfgpipe.devices import sharding
from tfgpipe.distribution import Replicas
from tfgpipe.graph import matmul

Body = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Gradient:
    """Names of the tensors that hold the gradient of one weight.

    Attributes:
        values: The gradient, or for a weight that was indexed the rows of it.
        indices: Which rows, `[n]`, or None if the gradient is dense.
        factors: The tensors `x` and `dy`, `[rows, width]` each, of a gradient that is
            `x^T @ dy`, or nothing.
        finished: What the sum of `values` is to be made into, or None: see `finishing`.
    """

    values: str
    indices: str | None = None
    factors: tuple[str, ...] = ()
    finished: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are there."""
        return (self.values,) if self.indices is None else (self.values, self.indices)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced stage. Strings are names of tensors in `graph`.

    Attributes:
        graph: Forward and gradient of the stage.
        captures: Values of tensors outside that the layers refer to.
        strangers: Variables that were read though they are among neither `weights` nor
            `state`: their values are constants here, so the trace is not to be used.
        inputs: What the stage before hands over.
        weights: Values of the trainable variables.
        state: Values of the non-trainable variables, read-only ones included.
        outputs: What goes to the stage after.
        new_state: For each state, its value afterwards; the same name if unchanged.
        statistics: What layers learn of the mini-batch beside their state.
        gathered: For each of these, its values for the microbatches before.
        new_gathered: For each of these, its values with this microbatch.
        replicas: What `Replicas` are made of, or nothing.
        num_meetings: How many sums over replicas there are.
        loss: Sum of the losses that layers added, or None.
        effects: Names of the stateful operations of the forward (a print, an
            assertion), which must run though nothing may depend on them.
        output_grads: For each output, its gradient to be fed, or None.
        loss_grad: The gradient of `loss` to be fed, or None.
        input_grads: For each input its gradient, or None where there is none.
        weight_grads: For each weight its gradient, or None where there is none.
        stand_ins: By names of tensors in `graph`, those to use in their place. The
            names here are those to use.
        shards: By names of weights and state that are parts of a weight, which shard
            each is of.
    """

    graph: tf.Graph
    captures: dict[str, tf.Tensor]
    strangers: tuple[keras.Variable, ...]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    state: tuple[str, ...]
    outputs: tuple[str, ...]
    new_state: tuple[str, ...]
    statistics: tuple[Accumulator, ...]
    gathered: tuple[tuple[str, ...], ...]
    new_gathered: tuple[tuple[str, ...], ...]
    replicas: tuple[str, ...]
    num_meetings: int
    loss: str | None
    effects: tuple[str, ...]
    output_grads: tuple[str | None, ...]
    loss_grad: str | None
    input_grads: tuple[str | None, ...]
    weight_grads: tuple[Gradient | None, ...]
    stand_ins: dict[str, str]
    shards: dict[str, int]

    @functools.cached_property
    def is_sharded(self) -> bool:
        """Whether it is for more than one device."""
        devices = {op.device for op in self.graph.get_operations()}
        return any(sharding.shard_of(device) is not None for device in devices)

    def shard(self, tensor: str) -> int:
        """Returns the shard on whose device a tensor is made."""
        device = self.graph.get_tensor_by_name(tensor).op.device
        return sharding.shard_of(device) or 0

    @property
    def carried(self) -> tuple[str, ...]:
        """What comes from the microbatch before: the state, and what is gathered."""
        return (*self.state, *itertools.chain(*self.gathered))

    @property
    def new_carried(self) -> tuple[str, ...]:
        """What goes to the microbatch after, in the same order."""
        return (*self.new_state, *itertools.chain(*self.new_gathered))

    @property
    def refers_outside(self) -> bool:
        """Whether there is more to it than the graph: it serves these layers alone."""
        return bool(self.captures or self.statistics or self.effects or self.strangers)

    def spec(self, tensor: str) -> tf.TensorSpec:
        """Returns the shape and type of a tensor."""
        symbolic = self.graph.get_tensor_by_name(tensor)
        return tf.TensorSpec(symbolic.shape, symbolic.dtype)


def trace_joint(
    body: Body,
    *,
    input_specs: Sequence[tf.TensorSpec],
    weights: Sequence[keras.Variable],
    state: Sequence[keras.Variable],
    num_replicas: int = 1,
    constant: Collection[int] = (),
    on_cpu: bool = False,
    numbers: Mapping[int, int] | None = None,
) -> Trace:
    """Traces `body` with variables replaced by explicit values.

    Args:
        body: The stage's computation, from its inputs to its outputs.
        input_specs: Shapes and types of the inputs of one microbatch.
        weights: The trainable variables that `body` reads.
        state: The other variables that it reads or assigns.
        num_replicas: How many replicas there are to sum over.
        constant: Positions of inputs that want no gradient.
        on_cpu: Whether it is to run on a CPU, by TensorFlow's own kernels.
        numbers: By `id` of each variable that is part of a weight, of which shard.

    Raises:
        ValueError: If `body` assigns a variable that is in neither list, since that
            update would be lost.
    """
    found: list[Trace] = []
    strangers: dict[int, keras.Variable] = {}

    def joint() -> None:
        inputs = [_placeholder(spec) for spec in input_specs]
        weight_values = [_placeholder(v) for v in weights]
        state_values = [_placeholder(v) for v in state]
        sources = [*inputs, *weight_values]
        replicas, parts = None, []
        if num_replicas > 1:
            parts = list(map(_placeholder, Replicas.specs()))
            replicas = Replicas(num_replicas, *parts)
        with tf.GradientTape() as tape:
            tape.watch(
                [
                    source
                    for position, source in enumerate(sources)
                    if differentiable(source) and position not in constant
                ]
            )
            scope = Scope(
                zip([*weights, *state], [*weight_values, *state_values], strict=True),
                replicas,
            )
            with scope:
                outputs = list(body(inputs))
            check_assignments(scope, [*weights, *state])
            loss = total(scope.losses)
        strangers.update(scope.strangers)
        gathered = [list(map(_placeholder, s.values)) for s in scope.statistics]
        merged = [s.merge(g) for s, g in zip(scope.statistics, gathered, strict=True)]
        graph = tf.compat.v1.get_default_graph()
        effects = [op.name for op in graph.get_operations() if op.op_def.is_stateful]
        targets = [*outputs, *([] if loss is None else [loss])]
        target_grads = [
            _placeholder(target) if differentiable(target) else None
            for target in targets
        ]
        paired = [
            (target, grad)
            for target, grad in zip(targets, target_grads, strict=True)
            if grad is not None
        ]
        gradients = [None] * len(sources)
        if paired:
            gradients = tape.gradient(
                [target for target, _ in paired],
                sources,
                output_gradients=[grad for _, grad in paired],
            )
        stand_ins = matmul.stand_ins(graph) if on_cpu else {}
        names = _Names(stand_ins)
        placeholders = zip(
            [*weights, *state], [*weight_values, *state_values], strict=True
        )
        sharded = {
            placeholder.name: numbers[id(variable)]
            for variable, placeholder in placeholders
            if numbers and id(variable) in numbers
        }
        found.append(
            Trace(
                graph=graph,
                captures={},
                strangers=(),
                inputs=names.all(inputs),
                weights=names.all(weight_values),
                state=names.all(state_values),
                outputs=names.all(outputs),
                new_state=names.all([scope.get_current_value(v) for v in state]),
                statistics=tuple(scope.statistics),
                gathered=tuple(map(names.all, gathered)),
                new_gathered=tuple(map(names.all, merged)),
                replicas=names.all(parts),
                num_meetings=next(replicas.numbers) if replicas else 0,
                loss=names(loss),
                effects=tuple(effects),
                output_grads=names.all(target_grads[: len(outputs)]),
                loss_grad=None if loss is None else names(target_grads[-1]),
                input_grads=names.all(
                    None if g is None else tf.convert_to_tensor(g)
                    for g in gradients[: len(inputs)]
                ),
                weight_grads=tuple(map(names.gradient, gradients[len(inputs) :])),
                stand_ins=stand_ins,
                shards=sharded,
            )
        )

    # Programs run on whatever device they are called on, so the trace names none.
    with tf.device(None):
        graph = tf.function(joint, autograph=False).get_concrete_function().graph
    captures = {inner.name: outer for outer, inner in graph.captures}
    return dataclasses.replace(
        found[0], captures=captures, strangers=tuple(strangers.values())
    )


def _placeholder(like: tf.Tensor | tf.TensorSpec | keras.Variable) -> tf.Tensor:
    return tf.compat.v1.placeholder(like.dtype, like.shape)


class _Names:
    """Names of tensors, with those of stand-ins in place of what they stand in for."""

    def __init__(self, stand_ins: Mapping[str, str]) -> None:
        self._stand_ins = stand_ins

    def __call__(self, tensor: tf.Tensor | None) -> Any:
        return None if tensor is None else self._stand_ins.get(tensor.name, tensor.name)

    def all(self, tensors: Iterable[tf.Tensor | None]) -> tuple[Any, ...]:
        return tuple(map(self, tensors))

    def gradient(
        self, gradient: tf.Tensor | tf.IndexedSlices | None
    ) -> Gradient | None:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return Gradient(self(gradient.values), self(gradient.indices))
        factors = matmul.factors(gradient) or ()
        return Gradient(self(gradient), factors=self.all(factors))


def total(losses: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Returns the sum of losses, in at least single precision, or None of none."""
    if not losses:
        return None
    dtype = tf.float64 if tf.float64 in [loss.dtype for loss in losses] else tf.float32
    return tf.add_n([tf.cast(tf.reduce_sum(loss), dtype) for loss in losses])
