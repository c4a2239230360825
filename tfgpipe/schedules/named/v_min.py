"""V-Min: a third of the memory of 1F1B."""

from __future__ import annotations

import dataclasses

from tfgpipe.schedules.folded import VShape


@dataclasses.dataclass(frozen=True)
class VMin(VShape):
    """V-Min: stages fold back, and microbatches go on at once.

    Qi et al. 2024 ("Pipeline Parallelism with Controllable Memory", sections 3.2, 3.3). A
    device holds at most 2 floor((P + 4) / 3) microbatches of one stage, a third of what
    it holds in 1F1B. If all passes of a stage take equally long, it waits for less than
    4 P of them; in 1F1B, for 6 (P - 1). Where they do not, its steady state has bubbles
    as well: see V-Half. Any M will do. For K=4 stages on P=2 devices, M=4:

        device 0  F0a ... ... F0b B0b F1a W0b B0a W0a F1b B1b F2a W1b B1a W1a F2b B2b F3a W2b B2a W2a F3b B3b W3b ... B3a W3a
        device 1  ... F0a F0b ... ... B0b B0a F1a F1b W0b W0a B1b B1a F2a F2b W1b W1a B2b B2a F3a F3b W2b W2a B3b B3a W3b W3a

    """  # noqa: E501

    name = "v_min"
    down = 1

    def turns(self, num_devices: int) -> tuple[int, int, int]:
        """Returns slots that differ if 3 divides P."""
        return (1, 1, 1) if num_devices % 3 else (3, 1, 3)

    def most_held(self, num_devices: int) -> int:
        """Returns floor((P + 4) / 3)."""
        return (num_devices + 4) // 3
