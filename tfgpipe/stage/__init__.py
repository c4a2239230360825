"""A pipeline stage: its joint graph of forward and gradient, and its functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.stage import layer_checks as layer_checks
    from tfgpipe.stage import normalization as normalization
    from tfgpipe.stage.boundary import BoundaryCodec as BoundaryCodec
    from tfgpipe.stage.boundary import TransferDtype as TransferDtype
    from tfgpipe.stage.empty_batches import NamedTensors as NamedTensors
    from tfgpipe.stage.functions import StageFunction as StageFunction
    from tfgpipe.stage.functions import StageFunctions as StageFunctions
    from tfgpipe.stage.options import StageOptions as StageOptions
    from tfgpipe.stage.options import platform_of as platform_of
    from tfgpipe.stage.output_masks import OutputMasks as OutputMasks
    from tfgpipe.stage.stage import Stage as Stage
    from tfgpipe.stage.stage import StageCache as StageCache
    from tfgpipe.stage.stage import TracedStage as TracedStage
    from tfgpipe.stage.stage import owned_variables as owned_variables
    from tfgpipe.stage.stage import trace_all as trace_all

__all__, __getattr__, __dir__ = lazy_exports(__name__)
