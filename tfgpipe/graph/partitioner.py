"""Splits a stage's joint graph into a forward and a backward subgraph.

A stage is traced once, forward and gradient together, as one joint graph. Both stage
functions are subgraphs of it, and rematerialisation is nothing but the choice of where
to split it:

      sources ──▶ f1 ──▶ f2 ──▶ outputs          forward
                  │      │
             ·····│······│·····························  the split
                  ▼      ▼
      d sources ◀ b1 ◀── b2 ◀── d outputs        backward

* `saving` splits along the dotted line: the tensors that cross it, the *residuals*, are
  saved by the forward for the backward (no rematerialisation).
* `recomputing` splits above `f1`: the backward contains f1 and f2 again and starts
  from the sources. Only what a second run would not reproduce, the results of stateful
  operations, is saved.

A backward can be split once more. The gradient goes down the layers of a stage in a
chain, and weight gradients branch off it. `halves` puts the chain into one subgraph
and the branches into another, which starts from the tensors that cross:

      d inputs ◀── b1 ◀──── b2 ◀── d outputs     input gradients
                    │        │
      ··············│········│·················  the second split
                    ▼        ▼
                  d w1     d w2                  weight gradients

A graph here is a mapping from the name of an operation to the names of its inputs in
`GraphDef` form: `op` or `op:index` for a tensor, `^op` for a control dependency.
"""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Collection, Iterable, Mapping, Sequence

Graph = Mapping[str, Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Cut:
    """A subgraph: operations with the tensors that are fed to them.

    Attributes:
        operations: Names of the operations to copy into the program.
        feeds: Tensors to feed, residuals and sources alike, in a fixed order.
    """

    operations: frozenset[str]
    feeds: tuple[str, ...]


def operation(tensor: str) -> str:
    """Returns the name of the operation that makes a tensor.

    >>> operation("dense/MatMul:0"), operation("^assert"), operation("x")
    ('dense/MatMul', 'assert', 'x')
    """
    return tensor.lstrip("^").rsplit(":", 1)[0]


def canonical(tensor: str) -> str:
    """Returns a tensor's full name, with its index; a control dependency as it is.

    >>> canonical("x"), canonical("split:1"), canonical("^assert")
    ('x:0', 'split:1', '^assert')
    """
    return tensor if ":" in tensor or tensor.startswith("^") else f"{tensor}:0"


def ordered(graph: Graph) -> dict[str, Sequence[str]]:
    """Returns a graph with its operations in an order in which they can run.

    >>> ordered({"c": ("b",), "b": ("a:1", "^a"), "a": ()})
    {'a': (), 'b': ('a:1', '^a'), 'c': ('b',)}
    """
    behind = {name: set(map(operation, inputs)) for name, inputs in graph.items()}
    order = graphlib.TopologicalSorter(behind).static_order()
    return {name: graph[name] for name in order}


def lasting(
    graph: Graph,
    *,
    sources: Collection[str],
    fetches: Iterable[str],
    constants: Collection[str],
    stateful: Collection[str],
    worthwhile: Collection[str],
) -> tuple[str, ...]:
    """Returns the tensors to hoist: computed once as long as `sources` do not change.

    They depend on `sources` and constants alone, come from an operation that is worth
    hoisting, and are read by an operation that is not hoisted.

    Args:
        graph: The whole computation, its operations in an order in which they can run.
        sources: Tensors that stay the same.
        fetches: Tensors to compute.
        constants: Operations whose results are constant.
        stateful: Operations whose results may differ from run to run.
        worthwhile: Operations with one result each that is worth hoisting.
    """
    # What constants alone lead to, and what the sources do.
    fixed, same = set(constants), set(map(operation, sources))
    for name, inputs in graph.items():
        behind = set(map(operation, inputs))
        if not behind or name in stateful:
            continue
        if behind <= fixed:
            fixed.add(name)
        elif behind <= fixed | same:
            same.add(name)
    needed = program(graph, fetches=fetches, feeds=sources).operations
    used = set(map(operation, fetches))
    kept = []
    for name in reversed(list(graph)):
        if name not in needed:
            continue
        if name in same and name not in used:
            continue  # Only hoisted tensors depend on it.
        if name in same and name in worthwhile:
            kept.append(f"{name}:0")
        else:
            used.update(map(operation, graph[name]))
    return tuple(reversed(kept))


def program(
    graph: Graph,
    *,
    fetches: Iterable[str],
    feeds: Collection[str],
    done: Iterable[str] = (),
) -> Cut:
    """Returns the operations between `feeds` and `fetches`, and the feeds they use.

    Control dependencies are followed like data, but stop at operations that are fed.

    Args:
        graph: The whole computation.
        fetches: Tensors to compute. A control dependency has an operation run.
        feeds: Tensors that are given.
        done: Operations that have run before, so that nothing need wait for them.
    """
    stop = {*map(operation, feeds), *done}
    used: dict[str, None] = {}
    operations: set[str] = set()
    pending = list(fetches)
    while pending:
        tensor = canonical(pending.pop())
        if tensor in feeds:
            used[tensor] = None
            continue
        name = operation(tensor)
        if name in operations or (tensor.startswith("^") and name in stop):
            continue
        operations.add(name)
        pending.extend(graph[name])
    ordered = tuple(feed for feed in feeds if feed in used)
    return Cut(frozenset(operations), ordered)


def saving(
    graph: Graph,
    *,
    sources: Collection[str],
    outputs: Iterable[str],
    gradients: Iterable[str],
    constants: Collection[str],
    done: Collection[str] = (),
) -> tuple[str, ...]:
    """Returns the residuals with which the backward recomputes nothing.

    Args:
        graph: The whole computation.
        sources: Tensors that both programs are given anyway.
        outputs: What the forward program fetches.
        gradients: What the backward program fetches.
        constants: Operations that are cheaper to copy than to keep the result of.
        done: Operations of the forward for which nothing in the backward waits.
    """
    fetches = [canonical(gradient) for gradient in gradients]
    forward = program(graph, fetches=outputs, feeds=sources).operations
    shared = forward - set(constants)
    needed = program(graph, fetches=fetches, feeds=sources, done=done).operations
    residuals: dict[str, None] = {}
    for name in graph:
        if name in needed and name not in shared:
            fetches.extend(canonical(i) for i in graph[name] if not i.startswith("^"))
    for tensor in fetches:
        if tensor not in sources and operation(tensor) in shared:
            residuals[tensor] = None
    return tuple(residuals)


def recomputing(
    graph: Graph,
    *,
    sources: Collection[str],
    outputs: Iterable[str],
    gradients: Iterable[str],
    stateful: Collection[str],
) -> tuple[str, ...]:
    """Returns the residuals that a recomputation cannot reproduce.

    These are the results of stateful operations (an unseeded random draw, a read of a
    resource) that the forward program ran and the backward program would run again.
    """
    forward = program(graph, fetches=outputs, feeds=sources).operations
    needed = program(graph, fetches=gradients, feeds=sources, done=stateful).operations
    once = forward & needed & set(stateful)
    consumed = [i for name in graph if name in needed for i in graph[name]]
    residuals = {
        canonical(i): None
        for i in (*consumed, *gradients)
        if not i.startswith("^") and operation(i) in once
    }
    return tuple(residuals)


def halves(
    graph: Graph,
    *,
    sources: Collection[str],
    outputs: Iterable[str],
    input_grads: Iterable[str],
    weight_grads: Sequence[str],
    constants: Collection[str],
    done: Collection[str] = (),
) -> tuple[str, ...]:
    """Returns the tensors that cross from input gradients to weight gradients.

    An operation of the backward is in the first half if input gradients depend on it,
    or two weight gradients do; what a single weight gradient needs is in the second.
    So neither half repeats an operation of the other. In a stage whose inputs
    need no gradient the first half ends at its first layer.

    Args:
        graph: The whole computation, its operations in an order in which they can run.
        sources: Tensors that all programs are given anyway.
        outputs: What the forward program fetches.
        input_grads: What the chain leads to.
        weight_grads: The gradients of the weights; one that is held in two tensors may
            count as two.
        constants: Operations that are cheaper to copy than to keep the result of.
        done: Operations of the forward for which nothing in the backward waits.
    """
    weights = [canonical(name) for name in weight_grads]
    forward = program(graph, fetches=outputs, feeds=sources).operations
    needed = program(graph, fetches=weights, feeds=sources, done=done).operations
    reached = dict.fromkeys(graph, 0)
    for name in input_grads:
        reached[operation(name)] |= 1
    for number, name in enumerate(weight_grads, start=1):
        reached[operation(name)] |= 1 << number
    for name in reversed(list(graph)):
        for tensor in graph[name]:
            if canonical(tensor) not in sources:
                reached[operation(tensor)] |= reached[name]
    hanging = {
        name
        for name in needed - forward
        if not reached[name] & 1 and reached[name].bit_count() == 1
    }
    shared = needed - hanging - set(constants)
    consumed = [
        canonical(i)
        for name in graph
        if name in hanging
        for i in graph[name]
        if not i.startswith("^")
    ]
    return tuple(
        dict.fromkeys(
            tensor
            for tensor in (*consumed, *weights)
            if tensor not in sources and operation(tensor) in shared
        )
    )
