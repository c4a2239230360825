"""No rematerialisation: forwards save all that backwards read."""

from __future__ import annotations

import dataclasses

from tfgpipe.remat.policy import Remat


@dataclasses.dataclass(frozen=True)
class NoRemat(Remat):
    """Recomputes nothing: all activations of the microbatches in flight are held."""

    name = "none"
    keeps_all = True
