"""Partitioning of a model into stages: profiles, exact solver, plans."""

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.partition import balances
    from tfgpipe.partition.balances import Balance
    from tfgpipe.partition.config import (
        LayerOptions,
        ModelOptions,
        PipelineConfig,
        takes_options,
    )
    from tfgpipe.partition.plan_model import plan
    from tfgpipe.partition.plans import (
        Plan,
        check_memory,
        example_microbatch,
        make_plan,
        plan_by_weights,
    )
    from tfgpipe.partition.resolution import resolve
    from tfgpipe.partition.saved_choices import load_arguments
    from tfgpipe.partition.solver import best_partition
    from tfgpipe.partition.step_config import StepConfig

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    submodules="balances",
    balances="Balance",
    config="LayerOptions ModelOptions PipelineConfig takes_options",
    plan_model="plan",
    plans="Plan check_memory example_microbatch make_plan plan_by_weights",
    resolution="resolve",
    saved_choices="load_arguments",
    solver="best_partition",
    step_config="StepConfig",
)
