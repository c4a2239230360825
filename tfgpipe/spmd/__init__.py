"""SPMD pipelines: alike stages stacked along an axis that is split over the cores."""

from tfgpipe.spmd.layer import SPMDPipeline
from tfgpipe.spmd.step import gradient_module, train_step_module
