"""Memory report: the bytes of each device of a mesh, as text.

           stage 0                stage 1
replica 0  CPU:0                  CPU:1
           dense, dense_1         dense_2, dense_3
           2.1 KiB, slots 4.2 KiB 2.1 KiB, slots 4.2 KiB
replica 1  CPU:2                  CPU:3
           ...                    ...
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from tfgpipe._util import readable_bytes, text_table


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Memory of one stage on one device.

    Attributes:
        device: The device's short name.
        layers: The layers there, in words.
        weight_bytes: Bytes of weights and of other variables of these layers.
        slot_bytes: Bytes that the optimizer keeps for them, or None if it is not built.
    """

    device: str
    layers: str
    weight_bytes: int
    slot_bytes: int | None

    @property
    def lines(self) -> tuple[str, ...]:
        """The device, what is there, and its size.

        >>> DeviceMemory("CPU:1", "dense", 2048, 4096).lines
        ('CPU:1', 'dense', '2.0 KiB, slots 4.0 KiB')
        """
        size = readable_bytes(self.weight_bytes)
        if self.slot_bytes is not None:
            size = f"{size}, slots {readable_bytes(self.slot_bytes)}"
        return self.device, self.layers, size


# `[replica][stage][shard]`; a stage that is not sharded has one.
MemoryGrid = Sequence[Sequence[Sequence[DeviceMemory]]]


def draw_memory(grid: MemoryGrid) -> str:
    """Draws a mesh as text: replicas down, stages across, shards below one another."""
    header = ["", *(f"stage {k}" for k in range(len(grid[0])))]
    rows = []
    for d, replica in enumerate(grid):
        cells = [[line for shard in stage for line in shard.lines] for stage in replica]
        for i, lines in enumerate(itertools.zip_longest(*cells, fillvalue="")):
            rows.append(("" if i else f"replica {d}", *lines))
    return text_table(header, rows, left=header)
