"""GPipe-style pipeline parallelism for Keras 3 on TensorFlow.

Importing this package is quick: names are loaded from their modules on first use, and
TensorFlow with them.
"""

from typing import TYPE_CHECKING

from tfgpipe._compat import check_keras_backend, check_tensorflow
from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe import accelerators as accelerators
    from tfgpipe import cluster as cluster
    from tfgpipe import layers as layers
    from tfgpipe import planner as planner
    from tfgpipe import quantization as quantization
    from tfgpipe import remat as remat
    from tfgpipe import schedules as schedules
    from tfgpipe import tensor_parallel as tensor_parallel
    from tfgpipe.accelerators import dry_run as dry_run
    from tfgpipe.capture import functional as functional
    from tfgpipe.devices import ShardingSpec as ShardingSpec
    from tfgpipe.devices import make_logical_cpus as make_logical_cpus
    from tfgpipe.distribution import (
        MultiWorkerPipelineStrategy as MultiWorkerPipelineStrategy,
    )
    from tfgpipe.distribution import PipelineStrategy as PipelineStrategy
    from tfgpipe.distribution import SPMDPipelineStrategy as SPMDPipelineStrategy
    from tfgpipe.distribution import place_optimizer as place_optimizer
    from tfgpipe.inspection import ActionCallback as ActionCallback
    from tfgpipe.inspection import TimelineCallback as TimelineCallback
    from tfgpipe.inspection import verify as verify
    from tfgpipe.partition import Balance as Balance
    from tfgpipe.partition import PipelineConfig as PipelineConfig
    from tfgpipe.partition import plan as plan
    from tfgpipe.pipelined_layer import PipelinedLayer as PipelinedLayer
    from tfgpipe.pipelined_layer import recut as recut
    from tfgpipe.pipelined_model import PipelinedModel as PipelinedModel
    from tfgpipe.pipelined_model import pipeline as pipeline
    from tfgpipe.planner import tune as tune
    from tfgpipe.quantization import export_int8 as export_int8
    from tfgpipe.report import plot_bubbles as plot_bubbles
    from tfgpipe.report import plot_differences as plot_differences
    from tfgpipe.report import plot_gpipe_bubbles as plot_gpipe_bubbles
    from tfgpipe.report import plot_memory as plot_memory
    from tfgpipe.report import plot_mesh as plot_mesh
    from tfgpipe.report import plot_peaks as plot_peaks
    from tfgpipe.report import plot_schedule as plot_schedule
    from tfgpipe.report import plot_timelines as plot_timelines
    from tfgpipe.report import stage_table as stage_table
    from tfgpipe.schedules import Action as Action
    from tfgpipe.schedules import Schedule as Schedule
    from tfgpipe.simulation import Costs as Costs
    from tfgpipe.simulation import Timeline as Timeline
    from tfgpipe.simulation import best_schedule as best_schedule
    from tfgpipe.simulation import simulate as simulate
    from tfgpipe.spmd import SPMDPipeline as SPMDPipeline
    from tfgpipe.stage import Codec as Codec

__version__ = "0.1.0"
__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    submodules="accelerators cluster layers planner quantization remat schedules "
    "tensor_parallel",
    accelerators="dry_run",
    capture="functional",
    devices="ShardingSpec make_logical_cpus",
    distribution="MultiWorkerPipelineStrategy PipelineStrategy SPMDPipelineStrategy "
    "place_optimizer",
    inspection="ActionCallback TimelineCallback verify",
    partition="Balance PipelineConfig plan",
    pipelined_layer="PipelinedLayer recut",
    pipelined_model="PipelinedModel pipeline",
    planner="tune",
    quantization="export_int8",
    report="plot_bubbles plot_differences plot_gpipe_bubbles plot_memory plot_mesh "
    "plot_peaks plot_schedule plot_timelines stage_table",
    schedules="Action Schedule",
    simulation="Costs Timeline best_schedule simulate",
    spmd="SPMDPipeline",
    stage="Codec",
    replaced={
        "TPUPipelineStrategy": "PipelineStrategy, whose devices may be TPUs "
        "(docs/how-to/tpu.md)"
    },
)

check_tensorflow()
check_keras_backend()
