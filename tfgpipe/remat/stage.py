"""Rematerialisation by stages, GPipe's: a stage is recomputed from its inputs."""

from __future__ import annotations

import dataclasses

from tfgpipe.remat.policy import Remat


@dataclasses.dataclass(frozen=True)
class StageRemat(Remat):
    """Recomputes a stage from its inputs (Huang et al. 2019, section 2.3)."""

    name = "stage"
