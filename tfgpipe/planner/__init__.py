"""The cluster you do not have yet: `python -m tfgpipe.planner --help`.

devices      what an accelerator can do; a table to extend
workload     a model as layers in a row, each with what it does and holds
transformers the workload of a transformer, from its sizes
models       the workload of a Keras model, without its weights
layout       replicas x stages x shards x microbatches x schedule x remat
memory       what a device holds, part by part
step_time    how long a step takes
question     what one layout would take and hold
ranking      the best layouts, and why the others lose
plans        what a search found, as text
picture      memory by part, drawn
flags        the command line

All but `models` decide on plain values and need no TensorFlow; names are loaded on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfgpipe.planner.devices import TABLE, Device, Link
    from tfgpipe.planner.layout import Layout
    from tfgpipe.planner.memory import Memory
    from tfgpipe.planner.models import read
    from tfgpipe.planner.picture import plot_memory
    from tfgpipe.planner.plans import Plans
    from tfgpipe.planner.question import Prediction, Question
    from tfgpipe.planner.ranking import search
    from tfgpipe.planner.transformers import transformer
    from tfgpipe.planner.workload import Layer, Workload

_MODULES = {
    "TABLE": "devices",
    "Device": "devices",
    "Layer": "workload",
    "Layout": "layout",
    "Link": "devices",
    "Memory": "memory",
    "Plans": "plans",
    "Prediction": "question",
    "Question": "question",
    "Remat": "layout",
    "Workload": "workload",
    "plot_memory": "picture",
    "read": "models",
    "search": "ranking",
    "transformer": "transformers",
}
__all__ = [
    "TABLE",
    "Device",
    "Layer",
    "Layout",
    "Link",
    "Memory",
    "Plans",
    "Prediction",
    "Question",
    "Remat",
    "Workload",
    "plot_memory",
    "read",
    "search",
    "transformer",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tfgpipe.planner' has no attribute {name!r}")
    module = importlib.import_module(f"tfgpipe.planner.{_MODULES[name]}")
    return getattr(module, name)
