"""SPMD pipelines: alike stages stacked along an axis that is split over the cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.spmd.layer import SPMDPipeline as SPMDPipeline
    from tfgpipe.spmd.step import gradient_module as gradient_module
    from tfgpipe.spmd.step import train_step_module as train_step_module

__all__, __getattr__, __dir__ = lazy_exports(__name__)
