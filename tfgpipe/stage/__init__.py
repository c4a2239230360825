"""A pipeline stage: its joint graph of forward and gradient, and its functions."""

from tfgpipe.stage import codecs, layer_checks, normalization
from tfgpipe.stage.boundary import Boundary
from tfgpipe.stage.codecs import Codec
from tfgpipe.stage.empty_batches import NamedTensors
from tfgpipe.stage.functions import StageFunction, StageFunctions
from tfgpipe.stage.options import StageOptions
from tfgpipe.stage.output_masks import OutputMasks
from tfgpipe.stage.progress import show_progress
from tfgpipe.stage.stage import (
    Stage,
    StageCache,
    TracedStage,
    owned_variables,
    trace_all,
)
