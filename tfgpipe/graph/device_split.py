"""Splits a function on several devices into pieces of one device each.

TensorFlow calls a function on one device, to which it first brings all arguments. A
function on several devices, called for every microbatch, would have every shard of
every weight brought to its first device, every time. So it is called in pieces: what
one device can do without waiting for another is a piece.

    shard 0   a ─▶ b ──────────▶ d ─▶ e           {a, b}        {d, e}
                    ╲           ╱           ─▶         ╲       ╱
    shard 1          c ────────╱                        {c} ──╱

The *level* of an operation is how many times the longest way to it goes from device to
device. Operations of one device and one level are a piece. An operation never reads
from its own piece what has been elsewhere in between, since that would be of a higher
level; so in the order of levels all pieces can run.

A *move*, an operation that only copies from another device, is no part of a piece. It
goes between them, so that it takes place while both devices compute something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from tfgpipe.graph import partitioner


@dataclasses.dataclass(frozen=True)
class DevicePart:
    """What one device does without waiting for another.

    Attributes:
        device: The device.
        operations: Names of the operations, in an order in which they can run.
        is_copy: Whether it is a single copy from another device.
    """

    device: int
    operations: tuple[str, ...]
    is_copy: bool = False


def split_by_device(
    graph: partitioner.OpGraph,
    devices: Mapping[str, int],
    *,
    copies: Collection[str] = (),
) -> list[DevicePart]:
    """Returns the pieces of a graph, in an order in which they can run.

    What an operation reads that is not in the graph is there from the start.

    >>> graph = {"a": (), "b": ("a",), "c": ("b",), "d": ("b", "c"), "e": ("d",)}
    >>> for piece in split_by_device(graph, {"a": 0, "b": 0, "c": 1, "d": 0, "e": 0}):
    ...     print(piece.device, piece.operations)
    0 ('a', 'b')
    1 ('c',)
    0 ('d', 'e')

    Args:
        graph: The computation, its operations in an order in which they can run.
        devices: The device of each operation.
        copies: Operations that do nothing but copy what they read.
    """
    levels: dict[str, int] = {}
    pieces: dict[_SortKey, list[str]] = {}
    for number, (name, inputs) in enumerate(graph.items()):
        device = devices[name]
        before = [x for x in map(partitioner.op_name, inputs) if x in levels]
        waits = [devices[x] != device for x in before]
        pairs = zip(before, waits, strict=True)
        level = levels[name] = max((levels[x] + wait for x, wait in pairs), default=0)
        if name in copies and before and all(waits):
            pieces[level, 0, device, number] = [name]
        else:
            pieces.setdefault((level, 1, device, 0), []).append(name)
    return [
        DevicePart(device, tuple(pieces[key]), is_copy=not computes)
        for key in sorted(pieces)
        for _, computes, device, _ in [key]
    ]


# The level; 0 for a move, which others of the level may read, else 1; the device; and
# what tells one move from another.
_SortKey = tuple[int, int, int, int]
