"""Splits a stage's joint graph into a forward and a backward subgraph.

A stage is traced once, forward and gradient together, as one joint graph. Both stage
functions are subgraphs of it, and rematerialisation is nothing but the choice of where
to split it:

      sources ──▶ f1 ──▶ f2 ──▶ outputs          forward
                  │      │
             ·····│······│·····························  the split
                  ▼      ▼
      d sources ◀ b1 ◀── b2 ◀── d outputs        backward

* `saved_tensors` splits along the dotted line: the tensors that cross it, the
  *residuals*, are saved by the forward for the backward (no rematerialisation).
* `saved_tensors_under_remat` splits above `f1`: the backward contains f1 and f2 again
  and starts from the sources. Only the results of stateful operations, which a second
  run would not reproduce, are saved.

A backward can be split once more. The gradient goes down the layers of a stage in a
chain, and weight gradients branch off it. `backward_split_tensors` puts the chain into
one subgraph and the branches into another, which starts from the tensors that cross:

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

OpGraph = Mapping[str, Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Subgraph:
    """A subgraph: operations with the tensors that are fed to them.

    Attributes:
        operations: Names of the operations to copy into the function.
        feeds: Tensors to feed, residuals and sources alike, in a fixed order.
    """

    operations: frozenset[str]
    feeds: tuple[str, ...]


def op_name(tensor: str) -> str:
    """Returns the name of the operation that computes a tensor.

    >>> op_name("dense/MatMul:0"), op_name("^assert"), op_name("x")
    ('dense/MatMul', 'assert', 'x')
    """
    return tensor.lstrip("^").rsplit(":", 1)[0]


def canonical(tensor: str) -> str:
    """Returns a tensor's full name, with its index; a control dependency as it is.

    >>> canonical("x"), canonical("split:1"), canonical("^assert")
    ('x:0', 'split:1', '^assert')
    """
    return tensor if ":" in tensor or tensor.startswith("^") else f"{tensor}:0"


def topological_order(graph: OpGraph) -> dict[str, Sequence[str]]:
    """Returns a graph with its operations in an order in which they can run.

    >>> topological_order({"c": ("b",), "b": ("a:1", "^a"), "a": ()})
    {'a': (), 'b': ('a:1', '^a'), 'c': ('b',)}
    """
    behind = {
        name: dict.fromkeys(map(op_name, inputs)) for name, inputs in graph.items()
    }
    order = graphlib.TopologicalSorter(behind).static_order()
    return {name: graph[name] for name in order}


def hoistable_tensors(
    graph: OpGraph,
    *,
    invariant: Collection[str],
    fetches: Iterable[str],
    constants: Collection[str],
    stateful: Collection[str],
    hoistable_ops: Collection[str],
) -> tuple[str, ...]:
    """Returns the tensors to hoist: computed once as long as `invariant` do not change.

    They depend on `invariant` and constants alone, come from an operation that is worth
    hoisting, and are used by an operation that is not hoisted.

    Args:
        graph: The joint graph, its operations in topological order.
        invariant: Tensors that stay the same.
        fetches: Tensors to compute.
        constants: Operations whose results are constant.
        stateful: Operations whose results may differ from run to run.
        hoistable_ops: Operations whose results are worth hoisting.
    """
    # What constants alone lead to, and what the sources do.
    fixed, same = set(constants), set(map(op_name, invariant))
    for name, inputs in graph.items():
        behind = set(map(op_name, inputs))
        if not behind or name in stateful:
            continue
        if behind <= fixed:
            fixed.add(name)
        elif behind <= fixed | same:
            same.add(name)
    needed = subgraph(graph, fetches=fetches, feeds=invariant).operations
    # By operation, its tensors that are used by what is not hoisted.
    used: dict[str, set[str]] = {}

    def use(tensors: Iterable[str]) -> None:
        for tensor in tensors:
            name = op_name(tensor)
            known = used.setdefault(name, set())
            known.add(canonical(tensor) if tensor[0] != "^" else f"{name}:0")

    use(fetches)
    hoisted: list[str] = []
    for name in reversed(list(graph)):
        if name not in needed:
            continue
        if name in same and name not in used:
            continue  # Only hoisted tensors depend on it.
        if name in same and name in hoistable_ops:
            hoisted.extend(sorted(used[name], reverse=True))
        else:
            use(graph[name])
    return tuple(reversed(hoisted))


def subgraph(
    graph: OpGraph,
    *,
    fetches: Iterable[str],
    feeds: Collection[str],
    completed: Iterable[str] = (),
) -> Subgraph:
    """Returns the operations between `feeds` and `fetches`, and the feeds they use.

    Control dependencies are followed like data, but stop at operations that are fed.

    Args:
        graph: A graph.
        fetches: Tensors to compute. A control dependency has an operation run.
        feeds: Tensors that are fed.
        completed: Operations that have run before, so that nothing need wait for them.
    """
    stop = {*map(op_name, feeds), *completed}
    used: dict[str, None] = {}
    operations: set[str] = set()
    pending = list(fetches)
    while pending:
        tensor = canonical(pending.pop())
        if tensor in feeds:
            used[tensor] = None
            continue
        name = op_name(tensor)
        if name in operations or (tensor.startswith("^") and name in stop):
            continue
        operations.add(name)
        pending.extend(graph[name])
    ordered = tuple(feed for feed in feeds if feed in used)
    return Subgraph(frozenset(operations), ordered)


def saved_tensors(
    graph: OpGraph,
    *,
    sources: Collection[str],
    outputs: Iterable[str],
    gradients: Iterable[str],
    constants: Collection[str],
    completed: Collection[str] = (),
) -> tuple[str, ...]:
    """Returns the residuals with which the backward recomputes nothing.

    Args:
        graph: The joint graph.
        sources: Tensors that are fed to forward and backward alike.
        outputs: Fetches of the forward.
        gradients: Fetches of the backward.
        constants: Operations that are cheaper to copy than to save the result of.
        completed: Operations of the forward for which nothing in the backward waits.
    """
    gradients = list(gradients)
    forward = subgraph(graph, fetches=outputs, feeds=sources).operations
    shared = forward - set(constants)
    needed = subgraph(
        graph, fetches=gradients, feeds=sources, completed=completed
    ).operations
    return _crossing(
        graph, needed - shared, fetches=gradients, sources=sources, shared=shared
    )


def saved_tensors_under_remat(
    graph: OpGraph,
    *,
    sources: Collection[str],
    outputs: Iterable[str],
    gradients: Iterable[str],
    stateful: Collection[str],
    saved: Collection[str] = (),
) -> tuple[str, ...]:
    """Returns the residuals of a backward that recomputes.

    These are the results of stateful operations (an unseeded random draw, a read of a
    resource) that the forward ran and the backward would run again, and other results
    to save that it reads, or would compute something from again.

    Args:
        graph: The joint graph.
        sources: Tensors that are fed to forward and backward alike.
        outputs: Fetches of the forward.
        gradients: Fetches of the backward.
        stateful: Operations whose results may differ from run to run.
        saved: Results of operations of the forward that are saved as well.
    """
    gradients = list(gradients)
    forward = subgraph(graph, fetches=outputs, feeds=sources).operations
    needed = subgraph(
        graph, fetches=gradients, feeds=sources, completed=stateful
    ).operations
    once = forward & needed & set(stateful)
    residuals = _crossing(
        graph, needed, fetches=gradients, sources=sources, shared=once
    )
    if not saved:
        return residuals
    read = subgraph(
        graph,
        fetches=gradients,
        feeds=tuple(dict.fromkeys((*residuals, *sources, *saved))),
        completed=stateful,
    )
    given = set(sources)
    return tuple(name for name in read.feeds if name not in given)


def backward_split_tensors(
    graph: OpGraph,
    *,
    sources: Collection[str],
    outputs: Iterable[str],
    input_grads: Iterable[str],
    weight_grads: Sequence[str],
    constants: Collection[str],
    completed: Collection[str] = (),
) -> tuple[str, ...]:
    """Returns the tensors that cross from input gradients to weight gradients.

    An operation of the backward is in the first half if input gradients depend on it,
    or two weight gradients do; it is in the second if a single weight gradient does.
    So neither half repeats an operation of the other. In a stage whose inputs
    need no gradient the first half ends at its first layer.

    Args:
        graph: The joint graph, its operations in topological order.
        sources: Tensors that are fed to all functions alike.
        outputs: Fetches of the forward.
        input_grads: The gradients of the inputs.
        weight_grads: The gradients of the weights; one that is in two tensors may
            count as two.
        constants: Operations that are cheaper to copy than to save the result of.
        completed: Operations of the forward for which nothing in the backward waits.
    """
    forward = subgraph(graph, fetches=outputs, feeds=sources).operations
    needed = subgraph(
        graph, fetches=weight_grads, feeds=sources, completed=completed
    ).operations
    # For each operation the gradients that depend on it, as bits; bit 0 for inputs.
    reached = dict.fromkeys(graph, 0)
    for name in input_grads:
        reached[op_name(name)] |= 1
    for bit, name in enumerate(weight_grads, start=1):
        reached[op_name(name)] |= 1 << bit
    for name in reversed(list(graph)):
        for tensor in graph[name]:
            if canonical(tensor) not in sources:
                reached[op_name(tensor)] |= reached[name]
    second_half = {
        name
        for name in needed - forward
        if not reached[name] & 1 and reached[name].bit_count() == 1
    }
    shared = needed - second_half - set(constants)
    return _crossing(
        graph, second_half, fetches=weight_grads, sources=sources, shared=shared
    )


def _crossing(
    graph: OpGraph,
    operations: Collection[str],
    *,
    fetches: Iterable[str],
    sources: Collection[str],
    shared: Collection[str],
) -> tuple[str, ...]:
    """Returns the tensors of `shared` that `operations` use or that are fetched."""
    used = [i for name in graph if name in operations for i in graph[name]]
    tensors = [canonical(i) for i in (*used, *fetches) if not i.startswith("^")]
    return tuple(
        dict.fromkeys(x for x in tensors if x not in sources and op_name(x) in shared)
    )
