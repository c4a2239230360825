"""A traced graph, run a few times, operation by operation.

TensorFlow would optimize the graph first, which takes longer than these runs do. Beside

* only operations that the results need run: no print, no assertion, no assignment;
* what one run draws at random can be drawn again in others, of all examples or of some;
* of a large weight a few columns are enough, of which the others are copies: a product
  with these alone is computed, and then its columns are copied. (A sum over columns is
  one over these few. What depends on what is the same.)
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfgpipe._compat import eager_ops, functions

# Of a weight that is narrow. No batch size of a probe, lest one is taken for the other.
NUM_COLUMNS = 5
# The most entries that a narrow weight is widened to: 64 MiB.
_MAX_ENTRIES = 2**24

# Stateful operations that change nothing, or what Python functions they call do.
_HARMLESS = {
    "EagerPyFunc",
    "Empty",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "PyFunc",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VariableShape",
}
# Random draws of which the values depend on nothing but seeds.
_DRAW = re.compile(r"(Stateless)?(Random|Truncated)(Standard)?(Uniform|Normal)\w*")
# Draws that depend on tensors as well: which of their inputs is about their mean.
_MEAN_OF_DRAW = {
    "RandomGamma": 1,
    "RandomPoissonV2": 1,
    "StatelessParameterizedTruncatedNormal": 2,
    "StatelessRandomGammaV2": 2,
    "StatelessRandomGammaV3": 4,
    "StatelessRandomPoisson": 2,
}
# Draws of classes, from their logits.
_DRAWS_OF_CLASSES = ("Multinomial", "StatelessMultinomial")
_SHUFFLES = ("RandomShuffle", "StatelessShuffle")
# The state of a `tf.random.Generator`, which draws that are replaced need not know.
_GENERATOR_STATE = "RngReadAndSkip"
Draw = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Narrow:
    """A tensor of which the columns along an axis repeat.

    Attributes:
        columns: The first columns.
        axis: The axis.
        size: The number of all columns.
    """

    columns: tf.Tensor
    axis: int
    size: int

    @property
    def num_entries(self) -> int:
        """The number of entries of the tensor."""
        return math.prod(self.columns.shape) // NUM_COLUMNS * self.size

    def widen(self) -> tf.Tensor:
        """Returns the tensor."""
        return tf.gather(
            self.columns, tf.range(self.size) % NUM_COLUMNS, axis=self.axis
        )


class RandomDraws:
    """The random draws of the first run, for later runs to repeat."""

    def __init__(self) -> None:
        self._drawn: list[tf.Tensor] = []

    def for_run(self, *, last: bool = False) -> Draw:
        """Returns a function that replaces one draw after another of a run.

        Args:
            last: True if a smaller batch is of the last examples, else of the first.
        """
        remaining = iter(tuple(self._drawn))

        def replaced(drawn: tf.Tensor) -> tf.Tensor:
            first = next(remaining, None)
            if first is None:
                first = _rolled_order(drawn)
                self._drawn.append(first)
                return first
            if not drawn.shape.rank:
                return first
            sizes = zip(first.shape, drawn.shape, strict=True)
            begin = [all_of - some if last else 0 for all_of, some in sizes]
            return tf.slice(first, begin, drawn.shape)

        return replaced


def _rolled_order(drawn: tf.Tensor) -> tf.Tensor:
    """Returns draws sorted along the first axis, the largest before all others.

    Examples in the order of such draws, rising or falling, cross from one half of a
    batch to the other; as drawn, one order in twenty of six examples does not.
    """
    if not drawn.shape.rank:
        return drawn
    return tf.constant(np.roll(np.sort(drawn.numpy(), axis=0), 1, axis=0))


def run(
    results: Sequence[tf.Tensor],
    arguments: Mapping[str, tf.Tensor | Narrow],
    draw: Draw,
) -> list[tf.Tensor]:
    """Returns the values of tensors of a graph, eagerly.

    Args:
        results: The tensors.
        arguments: Values of the graph's placeholders, by name.
        draw: Replaces random draws.

    Raises:
        NotImplementedError: If they depend on operations with side effects.
    """
    graph = results[0].graph
    operations = needed_operations(results)
    _check_effects(operations, graph)
    values = {**functions.captures(graph), **arguments}
    last_readers = {x.name: op for op in operations for x in op.inputs}
    kept = {x.name for x in results}
    for op in operations:
        if op.type != "Placeholder":
            inputs = [values[x.name] for x in op.inputs]
            made = _run_operation(op, inputs, draw)
            values.update(zip((x.name for x in op.outputs), made, strict=True))
        for x in op.inputs:
            if last_readers[x.name] is op and x.name not in kept:
                values.pop(x.name, None)
    return [_widened(values[x.name]) for x in results]


def needed_operations(
    results: Sequence[tf.Tensor], *, given: Sequence[tf.Tensor] = ()
) -> list[tf.Operation]:
    """Returns the operations that tensors of a graph are made by, in order.

    Args:
        results: The tensors.
        given: Tensors that are known, and so are all results of their operations.
    """
    needed, remaining = set(), [x.op for x in results]
    known = {x.op for x in given}
    while remaining:
        op = remaining.pop()
        if op not in needed and op not in known:
            needed.add(op)
            remaining += [x.op for x in op.inputs]
    return [op for op in results[0].graph.get_operations() if op in needed]


def _check_effects(operations: Sequence[tf.Operation], graph: tf.Graph) -> None:
    """Raises NotImplementedError if an operation does more than compute."""
    stateful = [op for op in operations if op.op_def.is_stateful]
    effects = {op.type for op in stateful if not (_calls(op) or _is_replaced(op))}
    if any(map(_calls, stateful)):
        # Those that they call cannot draw the same again.
        inner = functions.graphs_of_functions(graph.as_graph_def().library).values()
        called = [op for each in inner for op in each.get_operations()]
        effects |= {
            op.type for op in called if op.op_def.is_stateful and not _calls(op)
        }
    if effects := effects - _HARMLESS:
        raise NotImplementedError(f"effects of {', '.join(sorted(effects))}")


def _calls(op: tf.Operation) -> bool:
    """Returns whether an operation calls functions of the graph."""
    return any("func" in attribute.type for attribute in op.op_def.attr)


def _run_operation(
    op: tf.Operation, inputs: Sequence[tf.Tensor | Narrow], draw: Draw
) -> list[tf.Tensor | Narrow]:
    if _is_replaced(op):
        return [_replacement(op, list(map(_widened, inputs)), draw)]
    if not any(isinstance(x, Narrow) for x in inputs):
        return eager_ops.run_operation(op, inputs)
    columns = [x.columns if isinstance(x, Narrow) else x for x in inputs]
    try:
        made = [
            _described(x, result.shape)
            for x, result in zip(
                eager_ops.run_operation(op, columns), op.outputs, strict=True
            )
        ]
    except (tf.errors.OpError, ValueError):  # It takes all columns together.
        largest = max(x.num_entries for x in inputs if isinstance(x, Narrow))
        if largest > _MAX_ENTRIES:
            raise NotImplementedError(f"a weight of {largest:,} entries") from None
        return eager_ops.run_operation(op, list(map(_widened, inputs)))
    is_weight = all(
        isinstance(value, Narrow) or x.op.type == "Const"
        for value, x in zip(inputs, op.inputs, strict=True)
    )
    return made if is_weight else list(map(_widened, made))


def _is_replaced(op: tf.Operation) -> bool:
    """Returns whether an operation is random, and others compute in its place."""
    names = (*_MEAN_OF_DRAW, *_DRAWS_OF_CLASSES, _GENERATOR_STATE, *_SHUFFLES)
    return op.type in names or _DRAW.fullmatch(op.type) is not None


def _replacement(op: tf.Operation, inputs: list[tf.Tensor], draw: Draw) -> tf.Tensor:
    """Returns a replacement of a random result that is the same in each run."""
    if op.type in _SHUFFLES:
        return tf.roll(inputs[0], 1, axis=0)
    if op.type == _GENERATOR_STATE:
        return tf.zeros(op.outputs[0].shape, op.outputs[0].dtype)
    if op.type in _DRAWS_OF_CLASSES:
        likeliest = tf.argmax(inputs[0], axis=-1, output_type=op.outputs[0].dtype)
        return tf.repeat(likeliest[:, None], inputs[1], axis=1)
    if op.type in _MEAN_OF_DRAW:
        mean, shape = inputs[_MEAN_OF_DRAW[op.type]], inputs[0]
        if not op.type.startswith("Stateless"):  # One such shape for each mean.
            shape = tf.concat([shape, tf.shape(mean)], axis=0)
        return tf.broadcast_to(tf.cast(mean, op.outputs[0].dtype), shape)
    return draw(eager_ops.run_operation(op, inputs)[0])


def _widened(x: tf.Tensor | Narrow) -> tf.Tensor:
    return x.widen() if isinstance(x, Narrow) else x


def _described(made: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor | Narrow:
    """Returns the results of an operation on narrow inputs, narrow where its shape is.

    Raises:
        ValueError: If the shape does not tell.
    """
    different = [
        axis
        for axis, (size, declared) in enumerate(zip(made.shape, shape, strict=True))
        if size != declared and (declared is not None or size == NUM_COLUMNS)
    ]
    if not different:
        return made
    (axis,) = different
    if made.shape[axis] != NUM_COLUMNS or shape[axis] is None:
        raise ValueError(f"{made.shape} is neither {shape} nor columns of it")
    return Narrow(made, axis, shape[axis])
