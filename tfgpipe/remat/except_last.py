"""Rematerialisation of all microbatches but those whose backward follows at once."""

from __future__ import annotations

import dataclasses

from tfgpipe.remat.policy import Remat
from tfgpipe.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class ExceptLastRemat(Remat):
    """Recomputes a stage, but for microbatches whose backward follows at once.

    Under GPipe that is the last one (torchgpipe, Kim et al. 2020, section 2.2), on the
    last stage of 1F1B every one. What it keeps takes the place of what would be
    recomputed.
    """

    name = "except_last"

    def keeps(self, schedule: Schedule, k: int, m: int) -> bool:
        """Returns whether it is the last microbatch, or its backward comes next."""
        is_last = m == schedule.num_microbatches - 1
        return is_last or schedule.backward_follows_immediately(k, m)
