"""How to spread a model over devices: `python -m tfgpipe.planner --help`.

devices          accelerators: peaks, memory, links; a table to extend
workload         a model as layers in a row, each with its cost (`tfgpipe.costs`)
transformers     the workload of a transformer, from its sizes
models           the workload of a Keras model, without its weights
parallel_config  devices as replicas x stages x shards; microbatches, schedule, remat
shard_axes       the axes along which shards share a layer
memory           the memory of devices, by what it is for
step_time        the time of a step
plan_request     the estimate of one configuration
split_vocabulary the estimate of one whose head is over all devices
ranking          the search: the fastest, and why the others are rejected, as a table
command          the command line
settings         pipelines of a model on the devices here, with predicted steps
tuning           the fastest of these, by trials: `tfgpipe.tune`

All but `models` and the last two, which are loaded on first use, decide on plain values
and need no TensorFlow.
"""

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports
from tfgpipe.planner.command import Subject as Subject
from tfgpipe.planner.command import main as main
from tfgpipe.planner.devices import TABLE as TABLE
from tfgpipe.planner.devices import Device as Device
from tfgpipe.planner.devices import Link as Link
from tfgpipe.planner.parallel_config import ParallelConfig as ParallelConfig
from tfgpipe.planner.plan_request import Estimate as Estimate
from tfgpipe.planner.plan_request import PlanRequest as PlanRequest
from tfgpipe.planner.ranking import SearchResult as SearchResult
from tfgpipe.planner.ranking import search as search
from tfgpipe.planner.transformers import transformer as transformer
from tfgpipe.planner.workload import Workload as Workload

if TYPE_CHECKING:
    from tfgpipe.planner.models import read as read
    from tfgpipe.planner.tuning import Trial as Trial
    from tfgpipe.planner.tuning import Tuning as Tuning
    from tfgpipe.planner.tuning import tune as tune

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    models="read",
    tuning="Trial Tuning tune",
    replaced={"Layer": "`tfgpipe.costs.LayerCost`"},
)
