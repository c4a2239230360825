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

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe._util import IdentityMap, unique
from tfgpipe.capture import (
    Accumulator,
    TracingScope,
    check_assignments,
    is_differentiable,
    stack_losses,
)
from tfgpipe.devices import sharding
from tfgpipe.distribution import ReplicaGroup
from tfgpipe.graph import fake_quant, fusion, matmul

ForwardFunction = Callable[[Sequence[tf.Tensor]], Mapping[Any, tf.Tensor | None]]


@dataclasses.dataclass(frozen=True)
class GradientNames:
    """Names of the tensors that hold the gradient of one weight.

    Attributes:
        values: The gradient, or for a weight that was indexed the rows of it.
        indices: Which rows, `[n]`, or None if the gradient is dense.
        factors: The tensors `x` and `dy`, `[rows, width]` each, of a gradient that is
            `x^T @ dy`, or nothing.
        finalized: What the sum of `values` is to be made into, or None: see
            `quantized_gradients`.
    """

    values: str
    indices: str | None = None
    factors: tuple[str, ...] = ()
    finalized: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are there."""
        return (self.values,) if self.indices is None else (self.values, self.indices)


@dataclasses.dataclass(frozen=True)
class Given:
    """What a stage takes.

    Attributes:
        inputs: What earlier stages hand over.
        weights: Values of the trainable variables.
        state: Values of the non-trainable variables, read-only ones included.
        sums: Those of them that are sums over examples, as of metrics.
        replicas: The inputs of collectives over replicas, or nothing.
    """

    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    state: tuple[str, ...]
    sums: tuple[str, ...]
    replicas: tuple[str, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        """Values of all variables."""
        return (*self.weights, *self.state)


@dataclasses.dataclass(frozen=True)
class Forward:
    """What the forward of a stage makes.

    Attributes:
        keys: What each output is.
        outputs: What goes to later stages.
        dropped: The keys of what was given and is taken away.
        new_values: For each weight, then for each state, its value afterwards; the
            same name if unchanged.
        loss: The n losses that layers added, `[n]`, or None.
        loss_calls: For each of these, the index of the call that added it.
        side_effects: Names of the stateful operations (a print, an assertion), which
            must run though nothing may depend on them.
    """

    keys: tuple[Any, ...]
    outputs: tuple[str, ...]
    dropped: tuple[Any, ...]
    new_values: tuple[str, ...]
    loss: str | None
    loss_calls: tuple[int, ...]
    side_effects: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Backward:
    """What the backward of a stage takes and makes.

    Attributes:
        output_grads: For each output, its gradient to be fed, or None.
        loss_grad: The gradients of the losses to be fed, `[n]`, or None.
        input_grads: For each input its gradient, or None where there is none.
        weight_grads: For each weight its gradient, or None where there is none.
    """

    output_grads: tuple[str | None, ...]
    loss_grad: str | None
    input_grads: tuple[str | None, ...]
    weight_grads: tuple[GradientNames | None, ...]

    @property
    def given(self) -> tuple[str, ...]:
        """The gradients to be fed that there are."""
        return not_none(*self.output_grads, self.loss_grad)


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """What a layer accumulates over the microbatches of a step.

    Attributes:
        accumulator: What merges it, and updates variables by it.
        values: What there is before a microbatch.
        new_values: What there is after it.
    """

    accumulator: Accumulator
    values: tuple[str, ...]
    new_values: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """The joint graph of a stage. Strings are names of tensors in `graph`.

    Attributes:
        graph: Forward and gradient of the stage.
        captures: Values of outside tensors that the layers use.
        given: What it takes.
        forward: What the forward makes.
        backward: What the backward takes and makes.
        accumulated: What layers accumulate beside their state.
        num_collectives: How many sums over replicas there are.
        replacements: By names of tensors in `graph`, those to use in their place. The
            names here are those to use.
        shard_indices: By names of weights and state that are parts of a weight, which
            shard each is of.
        per_step: Which of the inputs are given once a step, the same for all
            microbatches.
        over_replicas: Entries of the new carry that all replicas compute alike, from
            the microbatch of all of them.
    """

    graph: tf.Graph
    captures: dict[str, tf.Tensor]
    given: Given
    forward: Forward
    backward: Backward
    accumulated: tuple[Accumulation, ...]
    num_collectives: int
    replacements: dict[str, str]
    shard_indices: dict[str, int]
    per_step: tuple[str, ...] = ()
    over_replicas: tuple[str, ...] = ()

    @property
    def ends(self) -> fusion.Ends:
        """What it takes and returns."""
        gradients = not_none(*self.backward.weight_grads)
        names = (name for g in gradients for name in (*g.names, *g.factors))
        return fusion.Ends(
            forward=(
                *self.forward.outputs,
                *self.new_carry,
                *not_none(self.forward.loss),
            ),
            gradients=(*not_none(*self.backward.input_grads), *names),
            output_gradients=self.backward.given,
            invariant=self.invariant,
        )

    @functools.cached_property
    def is_sharded(self) -> bool:
        """Whether it spans more than one device."""
        devices = {op.device for op in self.graph.get_operations()}
        return any(sharding.shard_index(device) is not None for device in devices)

    def shard_index(self, tensor: str) -> int:
        """Returns the shard on whose device a tensor is made."""
        device = self.graph.get_tensor_by_name(tensor).op.device
        return sharding.shard_index(device) or 0

    @property
    def carry(self) -> tuple[str, ...]:
        """What comes from the microbatch before: variables, and what is accumulated."""
        more = (values for x in self.accumulated for values in x.values)
        return (*self.given.variables, *more)

    @property
    def new_carry(self) -> tuple[str, ...]:
        """The new carry, for the microbatch after, in the same order."""
        more = (values for x in self.accumulated for values in x.new_values)
        return (*self.forward.new_values, *more)

    @property
    def changed_carry(self) -> tuple[str, ...]:
        """What of `new_carry` a microbatch makes."""
        pairs = zip(self.carry, self.new_carry, strict=True)
        known = (*self.invariant, *self.per_step_updates)
        return tuple(after for before, after in pairs if before not in known)

    @property
    def invariant(self) -> tuple[str, ...]:
        """Variables that are the same for all microbatches."""
        pairs = zip(self.given.variables, self.forward.new_values, strict=True)
        once = self.per_step_updates
        return tuple(b for b, a in pairs if a == b or b in once)

    @functools.cached_property
    def per_step_updates(self) -> dict[str, str]:
        """By variables that layers assign alike in all microbatches, the new values.

        They depend on no examples, as those of a masked kernel, and on no seed, which
        each microbatch advances. Among them are weights, frozen ones of two axes or
        more, and the state that they are made of, as of spectral normalization. Other
        state may count microbatches.
        """
        changed = self._changed(lambda x: x.is_floating or x.is_complex)
        changed = {b: a for b, a in changed.items() if b not in self.given.sums}
        pairs = zip(self.given.variables, self.forward.new_values, strict=True)
        alike = self._self_contained(changed, [b for b, a in pairs if a == b])
        pending = [
            before
            for before in alike
            if before in self.given.weights or self.spec(before).shape.rank > 1
        ]
        found: dict[str, str] = {}
        while pending:
            before = pending.pop()
            found[before] = alike[before]
            sources = self._sources(alike[before])
            pending.extend(x for x in sources if x in alike and x not in found)
        return found

    @functools.cached_property
    def integer_state(self) -> tuple[str, ...]:
        """State of integers that changes, and by itself: that of seed generators."""
        return tuple(self._self_contained(self._changed(lambda x: x.is_integer)))

    def _changed(self, wanted: Callable[[tf.DType], bool]) -> dict[str, str]:
        """Returns new values of variables of the wanted types, by those before."""
        pairs = zip(self.given.variables, self.forward.new_values, strict=True)
        return {b: a for b, a in pairs if b != a and wanted(self.spec(b).dtype)}

    def _self_contained(
        self, pairs: dict[str, str], constants: Sequence[str] = ()
    ) -> dict[str, str]:
        """Returns the pairs whose new values depend on each other and constants."""
        while True:
            others = self._dependent_on_others({*pairs, *constants})
            kept = {b: a for b, a in pairs.items() if a not in others}
            if kept == pairs:
                return kept
            pairs = kept

    def _dependent_on_others(self, given: Collection[str]) -> set[str]:
        """Returns the tensors that depend on anything but what is given."""
        found: set[str] = set()
        for op in self.graph.get_operations():  # Inputs come before what reads them.
            if any(x.name in found for x in op.inputs) or _is_source(op):
                found.update(x.name for x in op.outputs if x.name not in given)
        return found

    def _sources(self, tensor: str) -> set[str]:
        """Returns what a tensor depends on: what is given, and stateful results."""
        pending, seen, sources = [self.graph.get_tensor_by_name(tensor)], set(), set()
        while pending:
            x = pending.pop()
            if _is_source(x.op):
                sources.add(x.name)
            elif x.op not in seen:
                seen.add(x.op)
                pending.extend(x.op.inputs)
        return sources

    @property
    def has_captures(self) -> bool:
        """Whether it has captured tensors, so that it serves these layers alone."""
        return bool(self.captures or self.accumulated or self.forward.side_effects)

    def spec(self, tensor: str) -> tf.TensorSpec:
        """Returns the shape and type of a tensor."""
        symbolic = self.graph.get_tensor_by_name(tensor)
        return tf.TensorSpec(symbolic.shape, symbolic.dtype)

    def zeros(self) -> dict[str, tf.Tensor]:
        """Returns what is accumulated before the first microbatch: nothing."""
        names = itertools.chain(*(x.values for x in self.accumulated))
        return {name: zero_buffer(self.spec(name)) for name in names}


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
    non_differentiable: Collection[int] = (),
    per_step: Collection[int] = (),
    uses_cpu_kernels: bool = False,
    uses_gpu_kernels: bool = False,
    chain_cache: fusion.ChainCache | None = None,
    shard_indices: IdentityMap[keras.Variable, int] | None = None,
) -> JointGraph:
    """Traces `body` with variables replaced by explicit values, and its gradient.

    Args:
        body: The stage's computation, from its inputs to its outputs by key; None for
            what was given and is taken away.
        input_specs: Shapes and types of the inputs of one microbatch.
        weights: The trainable variables that `body` reads.
        state: The other variables that it reads or assigns.
        num_replicas: How many replicas there are to sum over.
        non_differentiable: Positions of inputs that want no gradient.
        per_step: Positions of inputs that are the same for all microbatches.
        uses_cpu_kernels: Whether TensorFlow's own kernels for CPUs are to run it.
        uses_gpu_kernels: Whether those for GPUs are.
        chain_cache: Functions of chains to share, or None if XLA compiles no chains.
        shard_indices: Of each variable that is part of a weight, which shard.

    Raises:
        ValueError: If `body` assigns a variable that is in neither list, since that
            update would be lost.
        CapturedVariablesError: If it reads one that is in neither list.
    """
    variables = [*weights, *state]

    def build() -> JointGraph:
        inputs = [_placeholder(spec) for spec in input_specs]
        values = [_placeholder(variable) for variable in variables]
        sources = [*inputs, *values[: len(weights)]]
        replicas, collective = _replicas(num_replicas)
        scope = TracingScope(zip(variables, values, strict=True), replicas)
        with tf.GradientTape() as tape:
            tape.watch(
                [
                    source
                    for position, source in enumerate(sources)
                    if is_differentiable(source) and position not in non_differentiable
                ]
            )
            made, loss = _run(body, inputs, scope, variables)
        outputs = {key: output for key, output in made.items() if output is not None}
        before = [list(map(_placeholder, x.values)) for x in scope.accumulators]
        merged = [x.merge(b) for x, b in zip(scope.accumulators, before, strict=True)]
        alike = [list(map(scope.get_current_value, scope.over_replicas))]
        alike += [
            a
            for x, a in zip(scope.accumulators, merged, strict=True)
            if x.over_replicas
        ]
        graph = tf.compat.v1.get_default_graph()
        effects = [op.name for op in graph.get_operations() if op.op_def.is_stateful]
        targets = [*outputs.values(), *not_none(loss)]
        target_grads, gradients = _differentiate(tape, targets, sources)
        products: dict[str, str] = {}
        replacements: dict[str, str] = {}
        if uses_cpu_kernels:
            products = matmul.products_of_rows(graph)
            replacements = products | matmul.faster_matmuls(graph)
        if uses_gpu_kernels:
            replacements = fake_quant.fake_quants_on_device(graph)
        shard_of = shard_indices or IdentityMap()

        def described(names: _NameMap) -> JointGraph:
            return JointGraph(
                graph=graph,
                captures=functions.captures(graph),
                given=Given(
                    names.all(inputs),
                    names.all(values[: len(weights)]),
                    names.all(values[len(weights) :]),
                    names.all(
                        value
                        for variable, value in zip(variables, values, strict=True)
                        if variable.aggregation == "sum"
                    ),
                    names.all(collective),
                ),
                forward=Forward(
                    keys=tuple(outputs),
                    outputs=names.all(outputs.values()),
                    dropped=tuple(
                        key for key, output in made.items() if output is None
                    ),
                    new_values=names.all(map(scope.get_current_value, variables)),
                    loss=names(loss),
                    loss_calls=tuple(scope.loss_calls),
                    side_effects=tuple(effects),
                ),
                backward=Backward(
                    names.all(target_grads[: len(outputs)]),
                    None if loss is None else names(target_grads[-1]),
                    names.all(
                        None if g is None else tf.convert_to_tensor(g)
                        for g in gradients[: len(inputs)]
                    ),
                    tuple(map(names.gradient, gradients[len(inputs) :])),
                ),
                accumulated=tuple(
                    Accumulation(x, names.all(b), names.all(a))
                    for x, b, a in zip(scope.accumulators, before, merged, strict=True)
                ),
                num_collectives=next(replicas.instance_offsets) if replicas else 0,
                replacements=replacements,
                shard_indices={
                    value.name: shard_of[variable]
                    for variable, value in zip(variables, values, strict=True)
                    if variable in shard_of
                },
                per_step=names.all(inputs[position] for position in per_step),
                over_replicas=names.all(itertools.chain(*alike)),
            )

        plain = described(_NameMap(replacements, products))
        if chain_cache is None:
            return plain
        replacements |= fusion.fused_chains(
            graph, replacements, plain.ends, chain_cache
        )
        return described(_NameMap(replacements, products))

    # A stage's functions run on whatever device they are called on: none is named.
    with tf.device(None):
        return functions.trace_graph(build)


def _is_source(op: tf.Operation) -> bool:
    """Returns whether results do not follow from inputs alone."""
    return bool(op.type == "Placeholder" or op.op_def.is_stateful)


def trace_with_captured(
    trace: Callable[[], JointGraph], captured: list[keras.Variable]
) -> JointGraph:
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
    """Returns what a stage makes, and the losses that its layers add, `[n]`."""
    with scope:
        made = body(inputs)
    check_assignments(scope, variables)
    if scope.captured_variables:
        raise CapturedVariablesError(unique(scope.captured_variables))
    return made, stack_losses(scope.losses)


def _differentiate(
    tape: tf.GradientTape, targets: Sequence[tf.Tensor], sources: Sequence[tf.Tensor]
) -> tuple[list[tf.Tensor | None], list[Any]]:
    """Returns the gradients of targets, to be fed, and those of sources by them."""
    given = [_placeholder(x) if is_differentiable(x) else None for x in targets]
    pairs = [(x, g) for x, g in zip(targets, given, strict=True) if g is not None]
    if not pairs:
        return given, [None] * len(sources)
    wanted, output_gradients = zip(*pairs, strict=True)
    gradients = tape.gradient(
        list(wanted), sources, output_gradients=list(output_gradients)
    )
    return given, gradients


def _placeholder(like: tf.Tensor | tf.TensorSpec | keras.Variable) -> tf.Tensor:
    return tf.compat.v1.placeholder(like.dtype, like.shape)


class _NameMap:
    """Names of tensors, with those of replacements for what they replace."""

    def __init__(
        self, replacements: Mapping[str, str], products: Mapping[str, str]
    ) -> None:
        self._replacements = replacements
        self._products = products

    def __call__(self, tensor: tf.Tensor | None) -> Any:
        if tensor is None:
            return None
        return self._replacements.get(tensor.name, tensor.name)

    def all(self, tensors: Iterable[tf.Tensor | None]) -> tuple[Any, ...]:
        return tuple(map(self, tensors))

    def gradient(
        self, gradient: tf.Tensor | tf.IndexedSlices | None
    ) -> GradientNames | None:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return GradientNames(self(gradient.values), self(gradient.indices))
        factors = matmul.weight_gradient_factors(gradient, self._products) or ()
        return GradientNames(self(gradient), factors=self.all(factors))


def zero_buffer(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns zeros in a buffer of their own.

    `Empty` is stateful, so no optimizer shares or folds these buffers.
    """
    return tf.raw_ops.Empty(shape=spec.shape, dtype=spec.dtype, init=True)


def not_none(*values: Any | None) -> tuple[Any, ...]:
    """Returns those of some values that are not None."""
    return tuple(value for value in values if value is not None)
