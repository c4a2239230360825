"""The joint graph of a stage: forward and gradient in one graph, and its signature.

Names are those of tensors of a `tf.Graph`, to which operations can only be added. So a
joint graph has its own edges: which tensors each operation reads. To rewrite it is to
add operations, and to have all that reads a tensor, the signature too, read another:

    y = f(x)     z = g(y)               y = f(x)     z = g(y')     y' = h(x)

Each rewriting is a `Pass`, a function from a joint graph to another. The new one knows
no old names, so a pass need not know what was rewritten before.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.devices import sharding
from tfgpipe.graph import partitioner

_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class GradientNames:
    """Names of the tensors that hold the gradient of one weight.

    Attributes:
        values: The gradient, or its rows for a weight that was indexed.
        indices: The indices of these rows, `[n]`, or None if the gradient is dense.
        factors: The tensors `x` and `dy`, `[rows, width]` each, of a gradient that is
            `x^T @ dy` and may be deferred, or nothing.
        finalized: The gradient made of the sum of `values`, or None for the sum itself.
    """

    values: str
    indices: str | None = None
    factors: tuple[str, ...] = ()
    finalized: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors whose sums over microbatches are the gradient."""
        return (self.values,) if self.indices is None else (self.values, self.indices)


@dataclasses.dataclass(frozen=True)
class StageInputs:
    """The inputs of a stage.

    Attributes:
        inputs: Activations of earlier stages, and inputs of the model.
        weights: Values of the trainable variables.
        state: Values of the non-trainable variables, read-only ones included.
        sums: Values among these that are sums over examples, as of metrics.
        replicas: Inputs of collectives over replicas, or nothing.
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
class ForwardOutputs:
    """The results of a stage's forward.

    Attributes:
        keys: Key of each output.
        outputs: Tensors for later stages.
        dropped: Keys of inputs that later stages do not have any more.
        new_values: New value of each weight, then of each state; the same name if it
            is unchanged.
        loss: The n losses that layers added, `[n]`, or None.
        loss_calls: Index of the call that added each of these.
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
class BackwardSignature:
    """The arguments and results of a stage's backward.

    Attributes:
        output_grads: Gradient of each output, to be fed, or None.
        loss_grad: Gradients of the losses, to be fed, `[n]`, or None.
        input_grads: Gradient of each input, or None.
        weight_grads: Gradient of each weight, or None.
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
    """The accumulator of a layer over the microbatches of a step.

    Attributes:
        accumulator: The `capture.Accumulator` that updates variables by it.
        values: Values before a microbatch.
        new_values: Values after it.
    """

    accumulator: Any
    values: tuple[str, ...]
    new_values: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """The joint graph of a stage. Strings are names of tensors.

    Attributes:
        graph: The operations, with those of forms that are not in use.
        edges: Tensors and control dependencies that each operation of `graph` waits
            for, in an order in which the operations can run.
        captures: Outside tensors that the layers use, by name.
        given: The inputs of the stage.
        forward: The results of the forward.
        backward: The arguments and results of the backward.
        accumulated: The accumulators of layers, beside their state.
        num_collectives: Number of sums over replicas.
        shard_indices: Shard of each weight and state that is part of a weight.
        per_step: Inputs that are given once a step, the same for all microbatches.
        over_replicas: Entries of the new carry that all replicas compute alike, from
            the microbatches of all.
        forms: The tensor in place of each that was rewritten.
    """

    graph: tf.Graph
    edges: partitioner.OpGraph
    captures: dict[str, tf.Tensor]
    given: StageInputs
    forward: ForwardOutputs
    backward: BackwardSignature
    accumulated: tuple[Accumulation, ...]
    num_collectives: int
    shard_indices: dict[str, int]
    per_step: tuple[str, ...] = ()
    over_replicas: tuple[str, ...] = ()
    forms: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def rewritten(self, forms: Mapping[str, str]) -> JointGraph:
        """Returns the graph with other tensors in place of some.

        Args:
            forms: The new tensor for the name of each old one. Operations that were
                added to `graph` read what they name: a form may read what it replaces.
                `^name` stands for control dependencies.
        """

        def new(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(forms.get(name, name) for name in names)

        known = {name: new(inputs) for name, inputs in self.edges.items()}
        return dataclasses.replace(
            self,
            edges=edges(self.graph, known, self.forms),
            captures=functions.captures(self.graph),
            forward=_renamed(self.forward, forms),
            backward=_renamed(self.backward, forms),
            accumulated=_renamed(self.accumulated, forms),
            over_replicas=_renamed(self.over_replicas, forms),
            forms={old: forms.get(x, x) for old, x in self.forms.items()} | {**forms},
        )

    def replaced(
        self,
        types: Collection[str],
        form: Callable[
            [tf.Operation, Callable[[tf.Operation], list[tf.Tensor]]],
            tf.Tensor | list[tf.Tensor] | None,
        ],
    ) -> JointGraph:
        """Returns the graph with other forms of some operations.

        Args:
            types: Types of the operations to look at.
            form: Returns the first result, or a list of results, of another form of an
                operation, or None. It is given the operation, and a function from an
                operation to the tensors that it reads by now.
        """
        forms: dict[str, str] = {}

        def inputs(op: tf.Operation) -> list[tf.Tensor]:
            return [
                self.graph.get_tensor_by_name(forms.get(name, name))
                for name in self.edges[op.name]
                if not name.startswith("^")
            ]

        for name in self.edges:
            op = self.graph.get_operation_by_name(name)
            if op.type not in types:
                continue
            scope, slash, _ = op.name.rpartition("/")
            with (
                self.graph.as_default(),
                self.graph.name_scope(scope + slash or None),
                tf.device(op.device),
                tf.control_dependencies(op.control_inputs),
            ):
                new = form(op, inputs)
            if new is not None:
                made = new if isinstance(new, list) else [new]
                for old, other in zip(op.outputs, made, strict=False):
                    forms[old.name] = other.name
        return self.rewritten(forms) if forms else self

    def operation(self, tensor: str) -> tf.Operation:
        """Returns the operation that makes a tensor."""
        return self.graph.get_operation_by_name(partitioner.op_name(tensor))

    def inputs_of(self, tensor: str) -> tuple[str, ...]:
        """Returns the names of the tensors that the operation of a tensor reads."""
        inputs = self.edges[partitioner.op_name(tensor)]
        return tuple(name for name in inputs if not name.startswith("^"))

    @property
    def forward_results(self) -> tuple[str, ...]:
        """All that the forward returns."""
        return (*self.forward.outputs, *self.new_carry, *not_none(self.forward.loss))

    @property
    def backward_results(self) -> tuple[str, ...]:
        """All that the backward returns, and what gradients of weights are made of."""
        gradients = not_none(*self.backward.weight_grads)
        names = ((*g.names, *g.factors, *not_none(g.finalized)) for g in gradients)
        return (*not_none(*self.backward.input_grads), *itertools.chain(*names))

    @functools.cached_property
    def is_sharded(self) -> bool:
        """True if it spans more than one device."""
        devices = {op.device for op in self.graph.get_operations()}
        return any(sharding.shard_index(device) is not None for device in devices)

    def shard_index(self, tensor: str) -> int:
        """Returns the shard on whose device a tensor is made."""
        return sharding.shard_index(self.operation(tensor).device) or 0

    @property
    def carry(self) -> tuple[str, ...]:
        """The carry from the microbatch before: variables and accumulators."""
        more = (values for x in self.accumulated for values in x.values)
        return (*self.given.variables, *more)

    @property
    def new_carry(self) -> tuple[str, ...]:
        """The new carry, for the microbatch after, in the same order."""
        more = (values for x in self.accumulated for values in x.new_values)
        return (*self.forward.new_values, *more)

    @property
    def assigned(self) -> dict[str, str]:
        """The new value of each variable, which is the old one if it is unchanged."""
        return dict(zip(self.given.variables, self.forward.new_values, strict=True))

    @property
    def changed_carry(self) -> tuple[str, ...]:
        """The entries of `new_carry` that a microbatch makes."""
        pairs = zip(self.carry, self.new_carry, strict=True)
        known = (*self.invariant, *self.per_step_updates)
        return tuple(after for before, after in pairs if before not in known)

    @property
    def invariant(self) -> tuple[str, ...]:
        """Variables that are the same for all microbatches."""
        once = self.per_step_updates
        return tuple(b for b, a in self.assigned.items() if a == b or b in once)

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
        constants = [b for b, a in self.assigned.items() if a == b]
        alike = self._self_contained(changed, constants)
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
        changed = {b: a for b, a in self.assigned.items() if b != a}
        return {b: a for b, a in changed.items() if wanted(self.spec(b).dtype)}

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
        """Returns the tensors that depend on anything but the given ones."""
        sources = [name for name in self.edges if self.is_source(name)]
        pending = [x for name in sources for x in self._outputs(name)]
        found: set[str] = set()
        while pending:
            tensor = pending.pop()
            if tensor not in given and tensor not in found:
                found.add(tensor)
                pending.extend(self._dependents.get(tensor, ()))
        return found

    @functools.cached_property
    def _dependents(self) -> dict[str, list[str]]:
        """By tensors, the outputs of the operations that read them."""
        found: dict[str, list[str]] = {}
        for name, inputs in self.edges.items():
            for tensor in inputs:
                found.setdefault(tensor, []).extend(self._outputs(name))
        return found

    def _outputs(self, name: str) -> list[str]:
        """Returns the tensors that an operation makes."""
        return [x.name for x in self.graph.get_operation_by_name(name).outputs]

    def _sources(self, tensor: str) -> set[str]:
        """Returns the sources that a tensor depends on: inputs and stateful results."""
        pending, seen, sources = [tensor], set(), set()
        while pending:
            tensor = pending.pop()
            name = partitioner.op_name(tensor)
            if self.is_source(name):
                sources.add(tensor)
            elif name not in seen:
                seen.add(name)
                pending.extend(self.inputs_of(tensor))
        return sources

    def is_source(self, name: str) -> bool:
        """Returns whether an operation is given, or stateful."""
        op = self.graph.get_operation_by_name(name)
        return op.type == "Placeholder" or op.op_def.is_stateful

    @property
    def has_captures(self) -> bool:
        """True if it has captured tensors, so that it serves these layers alone."""
        return bool(self.captures or self.accumulated or self.forward.side_effects)

    def spec(self, tensor: str) -> tf.TensorSpec:
        """Returns the shape and type of a tensor."""
        symbolic = self.graph.get_tensor_by_name(tensor)
        return tf.TensorSpec(symbolic.shape, symbolic.dtype)

    def zeros(self) -> dict[str, tf.Tensor]:
        """Returns the accumulators before the first microbatch: zeros."""
        return {name: zero_buffer(self.spec(name)) for name in self.accumulators}

    @property
    def accumulators(self) -> list[str]:
        """Names of what is accumulated over microbatches."""
        return list(itertools.chain(*(x.values for x in self.accumulated)))


Pass = Callable[[JointGraph], JointGraph]


def edges(
    graph: tf.Graph, known: partitioner.OpGraph, forms: Mapping[str, str]
) -> dict[str, Sequence[str]]:
    """Returns the operations that each operation of a graph waits for.

    Args:
        graph: The graph.
        known: The edges of its first operations.
        forms: Replacements of the tensors that the others read, by name.
    """
    added = {}
    for op in graph.get_operations()[len(known) :]:
        names = (
            *(x.name for x in op.inputs),
            *(f"^{x.name}" for x in op.control_inputs),
        )
        added[op.name] = tuple(forms.get(name, name) for name in names)
    return partitioner.topological_order({**known, **added})


def zero_buffer(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns zeros in a buffer of their own.

    `Empty` is stateful, so no optimizer shares or folds these buffers.
    """
    return tf.raw_ops.Empty(shape=spec.shape, dtype=spec.dtype, init=True)


def not_none(*values: Any | None) -> tuple[Any, ...]:
    """Returns those of some values that are not None."""
    return tuple(value for value in values if value is not None)


def _renamed(x: _R, forms: Mapping[str, str]) -> _R:
    """Returns names, in records and tuples, with some renamed."""
    value: Any = x
    if isinstance(value, str):
        value = forms.get(value, value)
    elif type(value) is tuple:
        value = tuple(_renamed(each, forms) for each in value)
    elif isinstance(value, _RECORDS):
        names = [field.name for field in dataclasses.fields(value)]
        value = dataclasses.replace(
            value, **{name: _renamed(getattr(value, name), forms) for name in names}
        )
    return value


_RECORDS = (ForwardOutputs, BackwardSignature, Accumulation, GradientNames)
