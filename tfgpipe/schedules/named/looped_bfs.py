"""Looped BFS: GPipe over several stages on each device."""

from __future__ import annotations

import dataclasses

from tfgpipe.schedules.named.gpipe import GPipe


@dataclasses.dataclass(frozen=True)
class LoopedBFS(GPipe):
    """Breadth-first pipeline parallelism: a stage on all microbatches, then the next.

    Lamy-Poirier 2022 ("Breadth-First Pipeline Parallelism", section 4). GPipe, whose
    bubble v stages on each device divide: (P - 1) / (v M + P - 1). All v M microbatches
    of a device's stages are in flight. Each stage runs once forward and once backward on
    the whole batch, so that sharded weights are gathered twice a step. Any M will do;
    from P on, the bubble is as above. For K=4 stages on P=2 devices, M=4:

        device 0  F0a F1a F2a F3a F0b F1b F2b F3b ... ... B3b B2b B1b B0b B3a B2a B1a B0a
        device 1  ... F0a F1a F2a F3a F0b F1b F2b F3b B3b B2b B1b B0b B3a B2a B1a B0a ...

    """  # noqa: E501

    name = "looped_bfs"
    stages_per_device = (2, 4)
