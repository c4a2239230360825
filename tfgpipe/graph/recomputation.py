"""The order of a backward that recomputes: late, and what is there at once of it.

All that a backward recomputes could run at its start, and would then be held at once.
Here each operation waits until the gradient comes to where it is needed, so that one
part after another, between saved tensors, is recomputed, used and freed:

    dy ──▶ b4 ──▶ b3 ──────▶ b2 ──▶ b1 ──▶ dx
            ▲      ▲  ┊       ▲      ▲
            f4 ◀─ f3  ╰┄┄▶ f2 ◀─── f1        f2 and f1 wait for b3
                 saved             saved

(Checkpoints in the sense of Chen et al. 2016, section 4.) Graphs are those of
`partitioner`, their operations in topological order.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping

from tfgpipe.graph.partitioner import OpGraph, canonical, op_name


def waits(
    graph: OpGraph, operations: Collection[str], *, recomputed: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Returns the operations that others wait for, beside those they read, to run late.

    An operation is first needed by one of the gradient, and waits for what that one
    reads of the gradient. That stands before it, so it depends on nothing that waits.

    >>> graph = {"f": ("x",), "b2": ("dy",), "b1": ("b2", "f")}
    >>> waits(graph, ["f", "b2", "b1"], recomputed=["f"])
    {'f': ('b2',)}

    Args:
        graph: The joint graph.
        operations: The operations of the backward.
        recomputed: The operations of the forward among them.

    Returns:
        Names of other operations, by that of each that waits.
    """
    first = {
        name: reader
        for reader, needed in _in_order(graph, operations, recomputed)
        for name in needed
    }
    found = {}
    for name, reader in first.items():
        # What waits for one that waits for the same need not.
        behind = {first.get(op_name(x)) for x in graph[name]}
        known = {
            n
            for n in map(op_name, graph[reader])
            if n in operations and n not in recomputed
        }
        if known and reader not in behind:
            found[name] = tuple(sorted(known))
    return found


def peak_bytes(
    graph: OpGraph,
    operations: Collection[str],
    *,
    recomputed: Collection[str],
    sizes: Mapping[str, float],
) -> float:
    """Returns the most bytes of recomputed tensors that are there at once.

    >>> graph = {"f1": ("x",), "f2": ("s",), "b2": ("dy", "f2"), "b1": ("b2", "f1")}
    >>> sizes = {"f1:0": 4, "f2:0": 8}
    >>> peak_bytes(graph, graph, recomputed=["f1", "f2"], sizes=sizes)
    8.0

    Args:
        graph: The joint graph.
        operations: The operations of the backward.
        recomputed: The operations of the forward among them.
        sizes: Bytes of each tensor that is made by these, in a buffer of its own.
    """
    order = [
        name
        for reader, needed in _in_order(graph, operations, recomputed)
        for name in (*reversed(needed), reader)
    ]
    reads = {name: {canonical(x) for x in graph[name]} for name in order}
    left = collections.Counter(x for read in reads.values() for x in read)
    made = collections.defaultdict(list)
    for tensor in sizes:
        made[op_name(tensor)].append(tensor)
    now = most = 0.0
    for name in order:
        if name in recomputed:
            now += sum(sizes[x] for x in made[name])
        most = max(most, now)
        for tensor in reads[name]:
            left[tensor] -= 1
            if not left[tensor] and op_name(tensor) in recomputed:
                now -= sizes.get(tensor, 0)
    return most


def _in_order(
    graph: OpGraph, operations: Collection[str], recomputed: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yields operations of the gradient, each with those that it is the first to need.

    These are in an order of which the reverse can run.
    """
    position = {name: i for i, name in enumerate(graph)}
    known: set[str] = set()
    for reader in graph:
        if reader not in operations or reader in recomputed:
            continue
        needed: list[str] = []
        pending = [op_name(x) for x in graph[reader]]
        while pending:
            name = pending.pop()
            if name in known or name not in operations or name not in recomputed:
                continue
            known.add(name)
            needed.append(name)
            pending.extend(map(op_name, graph[name]))
        yield reader, sorted(needed, key=lambda name: -position[name])
