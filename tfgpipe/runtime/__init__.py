"""Execution of a step: microbatches, carry, schedule executor, loss."""

from tfgpipe.runtime.coupled_layers import coupled_layers
from tfgpipe.runtime.coupled_losses import (
    CoupledLossPipeline,
    make_loss_pipeline,
)
from tfgpipe.runtime.generation import Generator
from tfgpipe.runtime.host_calls import HostCalls
from tfgpipe.runtime.layer_probes import check_batch_independence
from tfgpipe.runtime.loss_pipeline import LossPipeline
from tfgpipe.runtime.pipeline import AddedLosses, Pipeline, make_stages
from tfgpipe.runtime.probe_inputs import example_tensor, example_variable_value
from tfgpipe.runtime.stages_held import device_stages
from tfgpipe.runtime.state import VariableUpdate
from tfgpipe.runtime.timer import Recorder, TimingRecorder
