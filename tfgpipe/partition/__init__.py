"""Partitioning of a model into stages: profiles, exact solver, plans."""

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports
from tfgpipe.partition.solver import best_partition

if TYPE_CHECKING:
    from tfgpipe.partition.configuration import resolve
    from tfgpipe.partition.feasibility import check_feasible
    from tfgpipe.partition.plan_model import plan
    from tfgpipe.partition.plans import (
        Plan,
        example_microbatch,
        make_plan,
        plan_by_parameters,
    )
    from tfgpipe.partition.profiles import QUANTITIES, PlanSettings, Quantity

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    configuration="resolve",
    feasibility="check_feasible",
    plan_model="plan",
    plans="Plan example_microbatch make_plan plan_by_parameters",
    profiles="QUANTITIES PlanSettings Quantity",
)
