"""Copies a subgraph of a joint graph into a function of its own.

A traced stage is a graph; the part of it between some tensors that are fed and some
that are fetched is copied, as a `GraphDef`, into whatever function is being built.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.devices import sharding
from tfgpipe.graph import joint_graph, partitioner, recomputation

# Types that are hoisted: copies of weights in another dtype, padded or quantized, and
# the ranges to quantize with, or what is made of these.
_HOISTABLE_OP_TYPES = (
    "Cast",
    "FakeQuantWithMinMaxVars",
    "FakeQuantWithMinMaxVarsPerChannel",
    "Max",
    "Min",
    "Pack",
    "Pad",
    "PadV2",
)

# Types whose results the host makes for GPUs, which take them from its memory or whose
# kernels have integers in theirs, where the host would wait for them.
_HOST_OP_TYPES = ("Cast", "SelectV2", "StatelessRandomGetKeyCounter")

# Element-wise operations that code unaware of sharding inserts on a weight shard: Keras
# casts, `tf.recompute_grad` adds copies and a zero. They stay on the shard's device.
_ELEMENTWISE_OP_TYPES = ("AddV2", "Cast", "Identity")


@dataclasses.dataclass(frozen=True)
class SubgraphFunction:
    """A function copied from part of a stage.

    Attributes:
        feeds: Names of the tensors it takes.
        fetches: Names of the tensors it returns.
        run: The function, `feeds -> fetches`. Adds operations to the current graph.
    """

    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    run: Callable[..., list[tf.Tensor]]

    def by_name(self, values: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns the fetched tensors by name, of the fed ones by name."""
        made = self.run(*(values[feed] for feed in self.feeds))
        return dict(zip(self.fetches, made, strict=True))

    def compiled(self) -> SubgraphFunction:
        """Returns the same function, compiled by XLA."""
        return dataclasses.replace(self, run=functions.compiled(self.run))


class GraphSource:
    """A joint graph that subgraphs are copied from.

    Args:
        trace: The stage.
        on_one_device: True to have all shards on the device that runs the subgraph.

    Attributes:
        graph: The stage as `graph.partitioner` takes it apart, in an order in which it
            can run.
        stateful: Names of its stateful operations.
        constants: Names of its constants.
        hoistable_ops: Names of operations whose results are worth hoisting if they do
            not change during a step.
        host_ops: Names of operations that the host is to run for GPUs if it has what
            they are made of.
    """

    def __init__(
        self, trace: joint_graph.JointGraph, *, on_one_device: bool = False
    ) -> None:
        self.trace = trace
        self._graph_def = trace.graph.as_graph_def()
        if on_one_device:
            for node in self._graph_def.node:
                if sharding.shard_index(node.device) is not None:
                    node.device = ""
        elif trace.is_sharded:
            _colocate_with_shards(trace, self._graph_def)
        for node in self._graph_def.node:
            functions.forget_trace(node)
            node.input[:] = trace.edges.get(node.name, ())  # Later forms have none.
        self.graph = trace.edges
        operations = trace.graph.get_operations()
        self.stateful = [op.name for op in operations if op.op_def.is_stateful]
        self.constants = [op.name for op in operations if op.type == "Const"]
        hoistable = [op for op in operations if op.type in _HOISTABLE_OP_TYPES]
        # An operation's other form is worth as much.
        self.hoistable_ops = [
            partitioner.op_name(trace.forms.get(f"{op.name}:0", op.name))
            for op in hoistable
        ] + list(map(partitioner.op_name, trace.per_step_updates.values()))
        self.host_ops = [
            op.name
            for op in operations
            if op.type in _HOST_OP_TYPES
            and op.outputs[0].dtype in (tf.int32, tf.uint64)
        ]

    def extract(
        self,
        *,
        fetches: Sequence[str],
        feeds: Sequence[str],
        side_effects: Sequence[str] = (),
        completed: Sequence[str] = (),
        recomputed: Collection[str] = (),
    ) -> SubgraphFunction:
        """Returns the function from those `feeds` that it needs to `fetches`.

        Args:
            fetches: Names of the tensors to compute.
            feeds: Names of the tensors that can be fed.
            side_effects: Operations to run as well. (TensorFlow makes a function wait
                for the stateful operations in it.)
            completed: Operations that have run before, for which nothing waits.
            recomputed: Operations to run as late as they can.
        """
        fetches = tuple(dict.fromkeys(fetches))
        captures = self.trace.captures
        subgraph = partitioner.subgraph(
            self.graph,
            fetches=(*fetches, *(f"^{name}" for name in side_effects)),
            feeds=(*feeds, *captures),
            completed=completed,
        )
        taken = tuple(feed for feed in subgraph.feeds if feed not in captures)
        captured = {f: captures[f] for f in subgraph.feeds if f in captures}
        waits = {}
        if recomputed:
            waits = recomputation.waits(
                self.graph, subgraph.operations, recomputed=recomputed
            )
        graph_def = self._copy(subgraph.operations, waits)
        computed = [fetch for fetch in fetches if fetch not in subgraph.feeds]
        consumed = {
            partitioner.canonical(i) for node in graph_def.node for i in node.input
        }

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            values = {**dict(zip(taken, tensors, strict=True)), **captured}
            # An import maps only tensors of the very graph it goes to, which may be a
            # branch of a conditional; `identity` brings them there.
            values = {name: tf.identity(tensor) for name, tensor in values.items()}
            results = tf.graph_util.import_graph_def(
                graph_def,
                input_map={n: t for n, t in values.items() if n in consumed},
                return_elements=computed,
                name="",
            )
            values.update(zip(computed, results, strict=True))
            return [values[fetch] for fetch in fetches]

        return SubgraphFunction(taken, fetches, run)

    @functools.cached_property
    def fingerprint(self) -> Hashable:
        """Equal for joint graphs that compute the same, whatever their names.

        Captured tensors are equal if they are the same; it keeps them alive. Operations
        are numbered in the order they were traced in, so the graphs of two equal stacks
        of layers become the same bytes. Nothing is assumed of the layers.
        """
        numbers = {name: str(number) for number, name in enumerate(self.graph)}

        def numbered(tensor: str) -> str:
            control = "^" if tensor.startswith("^") else ""
            _, colon, index = tensor.partition(":")
            return control + numbers[partitioner.op_name(tensor)] + colon + index

        anonymous = self._copy(self.graph)
        for node in anonymous.node:
            inputs = [numbered(i) for i in node.input]
            node.name = numbers[node.name]
            node.input[:] = inputs
        trace = self.trace
        captures = tuple(
            (numbered(name), value.ref()) for name, value in trace.captures.items()
        )
        ends = [
            [name and numbered(name) for name in names]
            for names in (
                *dataclasses.astuple(trace.given),
                trace.per_step,
                trace.carry,
                trace.forward.outputs,
                trace.new_carry,
                (trace.forward.loss, trace.backward.loss_grad),
                trace.forward.side_effects,
                trace.backward.output_grads,
                trace.backward.input_grads,
                *(
                    (g.values, g.indices, g.finalized, *g.factors) if g else (None,)
                    for g in trace.backward.weight_grads
                ),
            )
        ]
        digest = hashlib.sha256(anonymous.SerializeToString(deterministic=True))
        digest.update(repr(ends).encode())
        return digest.hexdigest(), captures

    def _copy(
        self,
        operations: Collection[str],
        waits: Mapping[str, Sequence[str]] | None = None,
    ) -> tf.compat.v1.GraphDef:
        """Copies some operations, without control dependencies on any other.

        Args:
            operations: Their names.
            waits: By name, the names of others that an operation waits for as well.
        """
        waits = waits or {}
        copy = tf.compat.v1.GraphDef(
            versions=self._graph_def.versions, library=self._graph_def.library
        )
        for node in self._graph_def.node:
            if node.name in operations:
                added = copy.node.add()
                added.CopyFrom(node)
                added.input[:] = [
                    i
                    for i in node.input
                    if not i.startswith("^") or partitioner.op_name(i) in operations
                ] + [f"^{name}" for name in waits.get(node.name, ())]
        return copy


def _colocate_with_shards(
    trace: joint_graph.JointGraph, graph_def: tf.compat.v1.GraphDef
) -> None:
    """Puts copies of a weight shard, and its gradient, on the shard's device.

    That is, operations without a device. All others run on the primary device, and each
    would send the shard there and back for every microbatch.
    """
    held = {
        partitioner.op_name(name): shard for name, shard in trace.shard_indices.items()
    }
    for weight, gradient in zip(
        trace.given.weights, trace.backward.weight_grads, strict=True
    ):
        if weight in trace.shard_indices and gradient is not None:
            for name in gradient.names:
                held[_producer(trace.graph.get_tensor_by_name(name))] = (
                    trace.shard_indices[weight]
                )
    for node in graph_def.node:
        first = partitioner.op_name(node.input[0]) if node.input else ""
        if node.op in _ELEMENTWISE_OP_TYPES and first in held:
            held.setdefault(node.name, held[first])
        if node.name in held and not node.device:
            node.device = sharding.placeholder_device(held[node.name])


def _producer(tensor: tf.Tensor) -> str:
    """Returns the operation that makes what `tf.custom_gradient` returns copies of."""
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.op.name
