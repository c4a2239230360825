"""Partitioning of a model into stages: costs of layers, exact solver, plans."""

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports
from tfgpipe.partition.solver import best_partition

if TYPE_CHECKING:
    from tfgpipe.partition.configuration import resolve
    from tfgpipe.partition.costs import SegmentProfiler, call_weights
    from tfgpipe.partition.plan_model import plan
    from tfgpipe.partition.plans import (
        Plan,
        example_microbatch,
        make_plan,
        plan_by_parameters,
    )
    from tfgpipe.partition.profiles import (
        QUANTITIES,
        PlanSettings,
        Quantity,
        check_feasible,
        may_start,
    )

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    configuration="resolve",
    costs="SegmentProfiler call_weights",
    plan_model="plan",
    plans="Plan example_microbatch make_plan plan_by_parameters",
    profiles="QUANTITIES PlanSettings Quantity check_feasible may_start",
)
