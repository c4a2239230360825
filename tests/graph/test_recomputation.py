"""When a backward recomputes: late, without waiting in a circle, and what is held."""

from __future__ import annotations

import random

import pytest

from tfgpipe.graph import partitioner, recomputation

pytestmark = pytest.mark.pure


def chain(length):
    """A forward f0, f1, ... and its backward, each of which reads what f read."""
    graph = {f"f{i}": (f"f{i - 1}",) if i else () for i in range(length)}
    for i in reversed(range(length)):
        graph[f"b{i}"] = (f"b{i + 1}" if i < length - 1 else "dy", f"f{i}")
    return graph | {"dy": ()}


def order_of(graph, operations, waits):
    """Returns an order in which all can run, or raises if they wait in a circle."""
    given = {
        name: [x for x in map(partitioner.op_name, graph[name]) if x in operations]
        + list(waits.get(name, ()))
        for name in operations
    }
    return [*partitioner.topological_order(given)]


def test_what_is_recomputed_waits_for_the_gradient_that_comes_to_it():
    graph = chain(4)
    operations = [*graph]
    # f2 is saved, so nothing is needed to compute f3 again but f2.
    operations.remove("f2")
    forward = {"f0", "f1", "f3"}
    waits = recomputation.waits(graph, operations, recomputed=forward)
    # The gradient b1 reads f1, and b2; so f0, and f1 after it, wait for b2.
    assert waits == {"f0": ("b2",), "f3": ("dy",)}


def run_held(graph, order, recomputed, sizes):
    """Returns the most bytes of results that a later operation of the order reads."""
    most = 0
    for i in range(len(order)):
        left = {partitioner.op_name(x) for name in order[i:] for x in graph[name]}
        made = set(order[: i + 1]) & set(recomputed)
        now = sum(sizes[f"{x}:0"] for x in made if x in left or x == order[i])
        most = max(most, now)
    return most


@pytest.mark.parametrize("seed", range(30))
def test_any_graph_can_run_and_holds_what_was_said(seed):
    """Of random graphs: the order of the waits, walked by hand, holds no more."""
    draw = random.Random(seed)
    depth = draw.randint(2, 9)
    graph = {"dy": ()}
    for i in range(depth):
        reads = draw.sample(range(i), draw.randint(0, min(i, 2)))
        graph[f"f{i}"] = tuple(f"f{j}" for j in reads)
    for i in range(depth):
        reads = draw.sample(range(depth), draw.randint(0, min(depth, 2)))
        before = [f"b{draw.randrange(i)}"] if i else ["dy"]
        graph[f"b{i}"] = (*before, *(f"f{j}" for j in reads))
    read = {partitioner.op_name(x) for name in graph for x in graph[name]}
    operations = [x for x in graph if x[0] != "f" or x in read]
    recomputed = [x for x in operations if x[0] == "f" and draw.random() < 0.8]
    operations = [x for x in operations if x[0] != "f" or x in recomputed]
    waits = recomputation.waits(graph, operations, recomputed=recomputed)
    assert set(waits) <= set(recomputed)
    order_of(graph, operations, waits)
    sizes = {f"{x}:0": draw.randint(1, 9) for x in recomputed}
    most = recomputation.peak_bytes(
        graph, operations, recomputed=recomputed, sizes=sizes
    )
    pairs = recomputation._in_order(graph, operations, recomputed)
    order = [name for reader, needed in pairs for name in (*reversed(needed), reader)]
    assert most == run_held(graph, order, recomputed, sizes)


def test_a_chain_holds_one_part_after_another():
    graph = chain(6)
    sizes = dict.fromkeys((f"f{i}:0" for i in range(6)), 1)
    held = {}
    for saved in ((), ("f2",), ("f1", "f3")):
        operations = [x for x in graph if x not in saved]
        forward = [x for x in operations if x[0] == "f"]
        held[saved] = recomputation.peak_bytes(
            graph, operations, recomputed=forward, sizes=sizes
        )
    # Between f2 and the end three are recomputed, between f1 and f3 one.
    assert held == {(): 6, ("f2",): 3, ("f1", "f3"): 2}
