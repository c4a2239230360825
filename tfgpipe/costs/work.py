"""Work of a stage: its passes on a microbatch, and what its backward recomputes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfgpipe.costs.layer_cost import PassCost


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageWork:
    """Work of a stage on one microbatch, in FLOPs or seconds.

    Attributes:
        forward: Work of the forward.
        backward: Work of the backward, recomputation aside.
        recompute: Work of the recomputation.
    """

    forward: float
    backward: float
    recompute: float

    @property
    def total(self) -> float:
        """All passes together."""
        return self.forward + self.backward + self.recompute


def stage_work(layers: Sequence[PassCost], recomputed: Sequence[float]) -> StageWork:
    """Returns the work of a stage."""
    return StageWork(
        forward=sum(x.forward for x in layers),
        backward=sum(x.backward for x in layers),
        recompute=sum(n * x.again for n, x in zip(recomputed, layers, strict=True)),
    )
