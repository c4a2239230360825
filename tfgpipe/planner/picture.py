"""Memory by part, drawn."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tfgpipe.planner.devices import Device
from tfgpipe.planner.question import Prediction
from tfgpipe.report import plot_parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_memory(
    prediction: Prediction,
    *,
    device: Device,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draws what each device of a pipeline is to hold, beside what it has.

    Args:
        prediction: Of a layout, such as `plans.best[0]`.
        device: What the devices are, such as `plans.question.device`.
        path: Where to write the picture.

    Raises:
        ImportError: If Matplotlib is not installed.
    """
    return plot_parts(
        [held.parts for held in prediction.memory],
        capacity=device.memory,
        title=f"{device.name}: {prediction.layout}",
        path=path,
    )
