"""ZB-V: as good as no bubble, in the memory of 1F1B."""

from __future__ import annotations

import dataclasses

from tfgpipe.schedules.folded import VShape


@dataclasses.dataclass(frozen=True)
class ZBV(VShape):
    """ZB-V: stages fold back, so that the loss is on the first device.

    Qi et al. 2024 ("Zero Bubble Pipeline Parallelism", section 6; "Pipeline Parallelism
    with Controllable Memory", V-ZB). Passes of a stage that take equally long leave the
    bubble of P - 1 passes in which the first microbatch reaches the last device: a step
    has 6 M + P - 1. A device holds at most 2 P microbatches of one stage, what it holds
    of P in 1F1B. Any M will do. For K=4 stages on P=2 devices, M=4:

        device 0  F0a F1a ... F0b B0b F2a W0b F1b B1b B0a W1b F3a W0a F2b B2b B1a W2b F3b B3b B2a W1a B3a W3b W2a W3a
        device 1  ... F0a F0b F1a F1b B0b B0a W0b F2a W0a F2b B1b B1a W1b F3a W1a F3b B2b B2a B3b B3a W2b W2a W3b W3a

    """  # noqa: E501

    name = "zbv"
    down = 5

    def turns(self, num_devices: int) -> tuple[int, int, int]:
        """Returns 1 slot for each."""
        del num_devices
        return 1, 1, 1

    def most_held(self, num_devices: int) -> int:
        """Returns P."""
        return num_devices
