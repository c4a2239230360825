"""V-Half: half the memory of 1F1B, and half its bubble."""

from __future__ import annotations

import dataclasses

from tfgpipe.schedules.folded import VShape


@dataclasses.dataclass(frozen=True)
class VHalf(VShape):
    """V-Half: stages fold back, and microbatches come down the devices in two slots.

    Qi et al. 2024 ("Pipeline Parallelism with Controllable Memory", sections 3.2, 3.3). A
    device holds at most 2 floor(P / 2 + 1) microbatches of one stage, half of what it
    holds in 1F1B. If all passes of a stage take equally long, it waits for less than 3 P
    of them; in 1F1B, for 6 (P - 1). Any M will do. For K=4 stages on P=2 devices, M=4:

        device 0  F0a F1a ... F0b B0b F2a W0b F1b B1b W1b B0a F3a W0a F2b B2b W2b B1a W1a ... F3b B3b B2a W3b B3a W2a W3a
        device 1  ... F0a F0b F1a ... B0b F1b W0b F2a B0a B1b W0a F2b W1b F3a B1a B2b W1a F3b B2a W2b B3b B3a W2a W3b W3a

    """  # noqa: E501

    name = "v_half"
    down = 2

    def turns(self, num_devices: int) -> tuple[int, int, int]:
        """Returns slots that differ for even and odd P."""
        return (1, 1, 2) if num_devices % 2 else (4, 1, 5)

    def most_held(self, num_devices: int) -> int:
        """Returns floor(P / 2 + 1)."""
        return num_devices // 2 + 1
