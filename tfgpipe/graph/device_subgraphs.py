"""Splits a function on several devices into subgraphs of one device each.

TensorFlow calls a function on one device, to which it first brings all arguments. A
function on several devices, called for every microbatch, would have every shard of
every weight brought to its first device, every time. So it is called as one function
per *device subgraph*: the operations of one device that wait for no other in between.

    shard 0   a ─▶ b ──────────▶ d ─▶ e           {a, b}        {d, e}
                    ╲           ╱           ─▶         ╲       ╱
    shard 1          c ────────╱                        {c} ──╱

The *level* of an operation is how many times the longest way to it goes from device to
device. Operations of one device and one level are a subgraph: an operation that needs
another of its device through a third device has a higher level. So the subgraphs can
run in the order of levels.

A copy from another device is a subgraph of its own, so that it takes place while both
devices compute something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from tfgpipe.graph import partitioner


@dataclasses.dataclass(frozen=True)
class DeviceSubgraph:
    """Operations of one device that wait for no other device in between.

    Attributes:
        device: The device.
        operations: Names of the operations, in topological order.
        is_copy: True for a single copy from another device.
    """

    device: int
    operations: tuple[str, ...]
    is_copy: bool = False


def split_by_device(
    graph: partitioner.OpGraph,
    devices: Mapping[str, int],
    *,
    copies: Collection[str] = (),
) -> list[DeviceSubgraph]:
    """Returns the device subgraphs of a graph, in an order in which they can run.

    Inputs of operations that are not in the graph are there from the start.

    >>> graph = {"a": (), "b": ("a",), "c": ("b",), "d": ("b", "c"), "e": ("d",)}
    >>> for each in split_by_device(graph, {"a": 0, "b": 0, "c": 1, "d": 0, "e": 0}):
    ...     print(each.device, each.operations)
    0 ('a', 'b')
    1 ('c',)
    0 ('d', 'e')

    Args:
        graph: The computation, its operations in topological order.
        devices: The device of each operation.
        copies: Operations that do nothing but copy their inputs.
    """
    levels: dict[str, int] = {}
    # By level; 0 for a copy, which others of the level may use, else 1; device; and the
    # index of a copy, which is by itself.
    operations: dict[tuple[int, int, int, int], list[str]] = {}
    for i, (name, inputs) in enumerate(graph.items()):
        device = devices[name]
        before = [x for x in map(partitioner.op_name, inputs) if x in levels]
        level = levels[name] = max(
            (levels[x] + (devices[x] != device) for x in before), default=0
        )
        is_copy = name in copies and before and device not in map(devices.get, before)
        key = (level, 0, device, i) if is_copy else (level, 1, device, 0)
        operations.setdefault(key, []).append(name)
    return [
        DeviceSubgraph(key[2], tuple(operations[key]), is_copy=not key[1])
        for key in sorted(operations)
    ]
