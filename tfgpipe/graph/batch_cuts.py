"""Where the graph of a loss first puts the examples of a batch together.

A loss that a layer adds may be made of means over a batch, as one is that balances the
load of experts (Fedus et al. 2021, equations 4 to 6): of the shares of tokens, and of
the mean probabilities of experts. Behind it are tensors with values for each example;
those that are the last such are a *cut* of its graph. Of the cut of a whole mini-batch
the loss can be computed anywhere and at any time:

    x ─▶ router ─▶ softmax ─┬─▶ mean over the batch ─┐
                    cut ▶ ──┴─▶ top k ─▶ share ──────┴─▶ product ─▶ loss

An operation on values of examples is taken to keep them apart if its result has one
axis that grows with the batch. (A cumulative sum along that axis does not. So compare
the loss of a cut with the loss.)
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe._compat import functions
from tfgpipe.graph import eager_run

# From a loss back to a tensor: types of operations, and indices of their inputs.
Path = tuple[tuple[str, int], ...]

# By operation the same one in another graph.
Counterparts = Mapping[tf.Operation, tf.Operation] | None

# Operations of which the results depend on the shapes of their inputs alone.
_OF_SHAPES = frozenset({"Rank", "Shape", "ShapeN", "Size"})


@dataclasses.dataclass(frozen=True)
class Cut:
    """A tensor of the cut, found from a loss by the operations between them.

    Attributes:
        loss: The index of a loss that depends on it.
        path: From the loss back to the tensor, the type of each operation and the
            index of its input.
        axis: The axis that grows with the batch.
        shape: Its shape, with None for that axis, which may be the examples times
            others, such as their tokens.
        dtype: Its type.
    """

    loss: int
    path: Path
    axis: int
    shape: tuple[int | None, ...]
    dtype: tf.DType

    def of(self, losses: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the tensor in the graph of other losses, made by the same code.

        Raises:
            LookupError: If that graph differs from here to there.
        """
        tensor = losses[self.loss]
        for op_type, index in self.path:
            if tensor.op.type != op_type:
                raise LookupError(f"'{tensor.op.type}' in place of '{op_type}'")
            tensor = tensor.op.inputs[index]
        return tensor


def find(
    losses: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    counterparts: Counterparts,
) -> list[Cut]:
    """Returns a cut of the graph of losses.

    Args:
        losses: The losses, tensors of a graph.
        inputs: Placeholders with values for each example.
        counterparts: For each operation the same one in a graph of another batch size;
            None if an axis grows with the batch where its length is unknown.

    Raises:
        NotImplementedError: If there is none: if what comes after depends on weights
            or random numbers.
    """
    mixed = _mixed_tensors(losses[0].graph, inputs, counterparts)
    found: dict[str, tf.Tensor] = {}
    remaining, seen = list(losses), {x.name for x in losses}
    while remaining:
        tensor = remaining.pop()
        if mixed.get(tensor.name) is False:
            found[tensor.name] = tensor
            continue
        if tensor.op.type == "Placeholder" or tensor.op.op_def.is_stateful:
            raise NotImplementedError(f"it depends on '{tensor.op.name}'")
        remaining += [x for x in tensor.op.inputs if x.name not in seen]
        seen.update(x.name for x in tensor.op.inputs)
    paths = _paths(losses, found)
    return [_described(x, *paths[name], counterparts) for name, x in found.items()]


def _paths(
    losses: Sequence[tf.Tensor], tensors: Collection[str]
) -> dict[str, tuple[int, Path]]:
    """Returns for tensors a loss that depends on their values, and the path to it.

    Raises:
        NotImplementedError: If losses depend on the shape of one alone.
    """
    paths: dict[str, tuple[int, Path]] = {}
    for i, loss in enumerate(losses):
        paths.setdefault(loss.name, (i, ()))
    remaining = collections.deque(losses)
    while remaining:
        tensor = remaining.popleft()
        op, (number, path) = tensor.op, paths[tensor.name]
        if op.type in _OF_SHAPES:
            continue  # In a graph of a known batch size it is a constant.
        for i, x in enumerate(op.inputs):
            if x.name not in paths:
                paths[x.name] = number, (*path, (op.type, i))
                remaining.append(x)
    if lacking := set(tensors) - set(paths):
        raise NotImplementedError(f"it depends on the shape of {lacking}")
    return paths


def _described(
    tensor: tf.Tensor,
    loss: int,
    path: Path,
    counterparts: Counterparts,
) -> Cut:
    (axis,) = _batch_axes(tensor, counterparts)
    shape = tuple(None if i == axis else n for i, n in enumerate(tensor.shape))
    return Cut(loss, path, axis, shape, tensor.dtype)


def function_of(
    cut: Sequence[tf.Tensor], losses: Sequence[tf.Tensor]
) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
    """Returns the function from a cut to losses, copied from their graph."""
    graph_def = losses[0].graph.as_graph_def()
    needed = {op.name for op in eager_run.needed_operations(losses, given=cut)}
    nodes = [node for node in graph_def.node if node.name in needed]
    for node in nodes:
        functions.forget_trace(node)
        node.input[:] = [name for name in node.input if not name.startswith("^")]
    del graph_def.node[:]
    graph_def.node.extend(nodes)
    feeds, fetches = [x.name for x in cut], [x.name for x in losses]

    @functools.partial(tf.function, autograph=False)
    def run(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        given = dict(zip(feeds, values, strict=True))
        made: list[tf.Tensor] = tf.graph_util.import_graph_def(
            graph_def, input_map=given, return_elements=fetches, name="losses"
        )
        return made

    result: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]] = run
    return result


def _mixed_tensors(
    graph: tf.Graph,
    inputs: Sequence[tf.Tensor],
    counterparts: Counterparts,
) -> dict[str, bool]:
    """Returns for tensors that depend on examples whether they mix them."""
    mixed = {x.name: False for x in inputs if _batch_axes(x, counterparts) == [0]}
    for op in graph.get_operations():
        if op.type == "Placeholder" or op.type in _OF_SHAPES:
            continue
        given = [mixed[x.name] for x in op.inputs if x.name in mixed]
        if given:
            for x in op.outputs:
                mixed[x.name] = any(given) or len(_batch_axes(x, counterparts)) != 1
    return mixed


def _batch_axes(tensor: tf.Tensor, counterparts: Counterparts) -> list[int]:
    """Returns the axes that grow with the batch; none if the rank is not known."""
    if tensor.shape.rank is None:
        return []
    if counterparts is None:
        return [i for i, size in enumerate(tensor.shape) if size is None]
    other = counterparts[tensor.op].outputs[tensor.value_index]
    pairs = zip(tensor.shape, other.shape, strict=True)
    return [i for i, (a, b) in enumerate(pairs) if a != b]


def split_rows(tensor: tf.Tensor, cut: Cut, batch_size: tf.Tensor | int) -> tf.Tensor:
    """Returns a tensor of a cut with the examples first, `[B, n / B, ...]`."""
    moved = _moved(tensor, cut.axis, 0)
    first, *sizes = _sizes(moved)
    is_known = isinstance(batch_size, int)
    at_least_one = batch_size if is_known else tf.maximum(batch_size, 1)
    return tf.reshape(moved, [batch_size, first // at_least_one, *sizes])


def join_rows(rows: tf.Tensor, cut: Cut) -> tf.Tensor:
    """Returns a tensor of a cut as its graph has it, from `[B, n / B, ...]`."""
    batch_size, per_example, *sizes = _sizes(rows)
    joined = tf.reshape(rows, [batch_size * per_example, *sizes])
    return _moved(joined, 0, cut.axis)


def _sizes(tensor: tf.Tensor) -> list[Any]:
    """Returns the sizes of a tensor, numbers where they are known."""
    pairs = zip(tensor.shape, tf.unstack(tf.shape(tensor)), strict=True)
    return [size if known is None else known for known, size in pairs]


def _moved(tensor: tf.Tensor, source: int, target: int) -> tf.Tensor:
    """Returns a tensor with one axis moved."""
    if source == target:
        return tensor
    order = list(range(tensor.shape.rank))
    order.insert(target, order.pop(source))
    return tf.transpose(tensor, order)
