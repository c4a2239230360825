"""Execution of a step: microbatches, carry, schedule executor, loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.runtime.layer_probes import (
        check_batch_independence as check_batch_independence,
    )
    from tfgpipe.runtime.loss_pipeline import LossPipeline as LossPipeline
    from tfgpipe.runtime.pipeline import Pipeline as Pipeline
    from tfgpipe.runtime.pipeline import make_stages as make_stages
    from tfgpipe.runtime.probe_inputs import example_tensor as example_tensor
    from tfgpipe.runtime.probe_inputs import (
        example_variable_value as example_variable_value,
    )
    from tfgpipe.runtime.state import VariableUpdate as VariableUpdate
    from tfgpipe.runtime.timer import StepTimer as StepTimer
    from tfgpipe.runtime.timer import TimingRecorder as TimingRecorder

__all__, __getattr__, __dir__ = lazy_exports(__name__)
