"""Costs of layers, stages and steps: FLOPs, seconds and bytes.

| of | cost | from |
|---|---|---|
| a layer | `LayerCost`, `PassCost`, `LayerBytes` | its trace or a measurement (`SegmentProfiler`), a formula, a table of devices (`tfgpipe.planner`) |
| a stage | `StageWork`, `StageBytes` | those of its layers, and a policy of rematerialisation |
| a step | `StepLoad`, `Memory`; times by `tfgpipe.simulate` | those of its stages, and a schedule |

The partition, plans, memory limits, the planner and dry runs all read these.
"""  # noqa: E501

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports
from tfgpipe.costs.layer_cost import LayerCost as LayerCost
from tfgpipe.costs.layer_cost import PassCost as PassCost
from tfgpipe.costs.layer_cost import TensorBytes as TensorBytes
from tfgpipe.costs.layer_cost import Weights as Weights
from tfgpipe.costs.layer_cost import dtype_bytes as dtype_bytes
from tfgpipe.costs.memory import LayerBytes as LayerBytes
from tfgpipe.costs.memory import Memory as Memory
from tfgpipe.costs.memory import StageBytes as StageBytes
from tfgpipe.costs.memory import StepLoad as StepLoad
from tfgpipe.costs.memory import part_without_room as part_without_room
from tfgpipe.costs.memory import stage_bytes as stage_bytes
from tfgpipe.costs.work import StageWork as StageWork
from tfgpipe.costs.work import stage_work as stage_work

if TYPE_CHECKING:
    from tfgpipe.costs import profiler as profiler
    from tfgpipe.costs import tables as tables
    from tfgpipe.costs.profiler import SegmentProfiler as SegmentProfiler

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    submodules="profiler tables",
    profiler="SegmentProfiler",
)
