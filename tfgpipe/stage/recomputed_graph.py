"""What policies see of a traced stage: the operations that a backward would run again.

Their FLOPs are counted, and a byte that is read or written counts as some: on devices
of today arithmetic is that much faster than memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

from tfgpipe._util import num_bytes
from tfgpipe.graph import flops, joint_graph, partitioner, peak_memory
from tfgpipe.remat import ForwardGraph

FLOPS_PER_TRAFFIC_BYTE = 16.0
"""FLOPs that a byte counts as that an operation reads or writes, products aside."""


def forward_graph(
    trace: joint_graph.JointGraph,
    graph: partitioner.OpGraph,
    *,
    recomputed: Collection[str],
    gradient: Collection[str],
    gradients: Sequence[str],
    peak_bytes: Callable[[Collection[str]], float],
) -> ForwardGraph:
    """Returns the graph that a policy sees.

    Args:
        trace: The stage.
        graph: The stage as `graph.partitioner` takes it apart.
        recomputed: Names of the operations that the backward runs again.
        gradient: Names of its other operations.
        gradients: Fetches of the backward.
        peak_bytes: As in `ForwardGraph`.
    """
    names = [name for name in graph if name in recomputed]

    def read_by(name: str) -> list[str]:
        read = (partitioner.canonical(x) for x in graph[name] if not x.startswith("^"))
        return [x for x in dict.fromkeys(read) if partitioner.op_name(x) in recomputed]

    reads = {name: read_by(name) for name in names}
    wanted = {x for name in graph if name in gradient for x in read_by(name)}
    wanted.update(x for x in gradients if partitioner.op_name(x) in recomputed)
    read = wanted.union(*reads.values())
    results = {
        name: [x.name for x in trace.operation(name).outputs if x.name in read]
        for name in names
    }

    @functools.cache
    def costs() -> dict[str, tuple[float, float]]:
        return flops.each(trace.graph, names)

    def cost(name: str) -> float:
        count, traffic = costs()[name]
        return count + FLOPS_PER_TRAFFIC_BYTE * traffic

    return ForwardGraph(
        types={name: trace.operation(name).type for name in names},
        reads=reads,
        results=results,
        wanted=sorted(wanted),
        sizes={x: num_bytes(trace.spec(x)) for each in results.values() for x in each},
        cost=cost,
        peak_bytes=peak_bytes,
    )


def buffer_sizes(
    trace: joint_graph.JointGraph, operations: Collection[str]
) -> dict[str, int]:
    """Returns the bytes of each tensor that operations make in a buffer of its own."""
    made = [x for name in operations for x in trace.operation(name).outputs]
    own = {x.name for x in peak_memory.distinct_buffers(made)}
    return {x.name: num_bytes(x) for x in made if x.name in own}
