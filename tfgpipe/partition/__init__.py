"""Partitioning of a model into stages: costs of layers, exact solver, plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.partition.configuration import resolve as resolve
    from tfgpipe.partition.costs import SegmentProfiler as SegmentProfiler
    from tfgpipe.partition.costs import call_weights as call_weights
    from tfgpipe.partition.plan_model import plan as plan
    from tfgpipe.partition.plans import Plan as Plan
    from tfgpipe.partition.plans import example_microbatch as example_microbatch
    from tfgpipe.partition.plans import make_plan as make_plan
    from tfgpipe.partition.plans import plan_by_parameters as plan_by_parameters
    from tfgpipe.partition.profiles import QUANTITIES as QUANTITIES
    from tfgpipe.partition.profiles import PlanSettings as PlanSettings
    from tfgpipe.partition.profiles import Quantity as Quantity
    from tfgpipe.partition.profiles import check_feasible as check_feasible
    from tfgpipe.partition.profiles import may_start as may_start
    from tfgpipe.partition.solver import best_partition as best_partition

__all__, __getattr__, __dir__ = lazy_exports(__name__)
