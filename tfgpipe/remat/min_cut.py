"""The cheapest choice of what to save and what to compute again: a minimum cut.

A tensor that is there in the backward was saved, for `price` times its bytes, or its
operation runs again, for its cost, and then all is there that the operation reads:

    source ──▶ tensor ── price * bytes ──▶ operation ── cost ──▶ sink
                 ▲                             │
                 └──────── infinite ───────────┘  to each tensor that it reads

Tensors that the gradient reads are on the side of the source. A saved tensor is one
there whose operation is on the other. Such a graph is that of the partitioner of
functorch (Horace He, "Min-cut optimal recomputation", 2022); its cut is exact, for any
graph and any price.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable

from tfgpipe.remat.forward_graph import ForwardGraph

_INFINITE = 1 << 62


def cheapest_saved(graph: ForwardGraph, price: float) -> list[str]:
    """Returns the tensors to save: least are bytes times price and recomputation.

    >>> graph = ForwardGraph(
    ...     types={"product": "MatMul", "relu": "Relu"},
    ...     reads={"product": [], "relu": ["product:0"]},
    ...     results={"product": ["product:0"], "relu": ["relu:0"]},
    ...     wanted=["relu:0"],
    ...     sizes={"product:0": 8, "relu:0": 8},
    ...     cost={"product": 1000, "relu": 2}.get,
    ...     peak_bytes=len,
    ... )
    >>> cheapest_saved(graph, 100), cheapest_saved(graph, 200)
    (['relu:0'], [])

    Args:
        graph: The operations.
        price: FLOPs that a saved byte must spare.
    """
    flow = _Flow()
    for tensor in graph.wanted:
        flow.add("source", tensor, _INFINITE)
    for name in graph.types:
        flow.add(name, "sink", round(graph.cost(name)))
        for tensor in graph.results[name]:
            # At least 1, so that of two views of a buffer one is saved.
            size = 1 + round(price * graph.sizes[tensor])
            flow.add(tensor, name, size)
        for tensor in graph.reads[name]:
            flow.add(name, tensor, _INFINITE)
    there = flow.source_side()
    return [
        tensor
        for name in graph.types
        for tensor in graph.results[name]
        if tensor in there and name not in there
    ]


class _Flow:
    """A network from `"source"` to `"sink"`, and its maximum flow (Dinic 1970)."""

    def __init__(self) -> None:
        self._index: dict[Hashable, int] = {"source": 0, "sink": 1}
        # Edges out of each node, those back among them: edge e goes back as e ^ 1.
        self._edges: list[list[int]] = [[], []]
        self._heads: list[int] = []
        self._left: list[int] = []

    def add(self, start: str, end: str, capacity: int) -> None:
        """Adds an edge. Names of operations and tensors differ by their index."""
        for node in (start, end):
            if node not in self._index:
                self._index[node] = len(self._edges)
                self._edges.append([])
        a, b = self._index[start], self._index[end]
        for tail, head, size in ((a, b, capacity), (b, a, 0)):
            self._edges[tail].append(len(self._heads))
            self._heads.append(head)
            self._left.append(size)

    def source_side(self) -> set[Hashable]:
        """Returns the nodes on the side of the source in a minimum cut."""
        while (levels := self._levels())[1] is not None:
            at = [0] * len(self._edges)  # Edges before these lead nowhere.
            while self._push(levels, at):
                pass
        return {name for name, i in self._index.items() if levels[i] is not None}

    def _levels(self) -> list[int | None]:
        """Returns the distance of each node from the source, None without a way."""
        levels: list[int | None] = [None] * len(self._edges)
        levels[0] = 0
        pending = collections.deque([0])
        while pending:
            node = pending.popleft()
            for edge in self._edges[node]:
                head = self._heads[edge]
                if self._left[edge] and levels[head] is None:
                    levels[head] = (levels[node] or 0) + 1
                    pending.append(head)
        return levels

    def _push(self, levels: list[int | None], at: list[int]) -> bool:
        """Sends flow along one way, level by level; false if there is none left."""
        path: list[int] = []
        node = 0
        while node != 1:
            edges = self._edges[node]
            while at[node] < len(edges):
                edge = edges[at[node]]
                head = self._heads[edge]
                if self._left[edge] and levels[head] == (levels[node] or 0) + 1:
                    break
                at[node] += 1
            if at[node] < len(edges):
                path.append(edge)
                node = head
            elif path:  # A dead end: back, and never here again.
                node = self._heads[path.pop() ^ 1]
                at[node] += 1
            else:
                return False
        most = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= most
            self._left[edge ^ 1] += most
        return True
