"""An experiment's model, ready to train."""

from __future__ import annotations

import contextlib
from pathlib import Path

import keras

import tfgpipe
from params.experiment import Experiment
from tfgpipe.report import device_memory, draw_memory
from tfgpipe.schedules import draw
from trainer import devices


def build(
    experiment: Experiment,
    scope: contextlib.AbstractContextManager[object] | None = None,
) -> tfgpipe.PipelinedModel:
    """Returns the model with its optimizer's slots made, and prints its stages.

    Args:
        experiment: What to build the model of.
        scope: The scope to build it in. Defaults to that for the devices here.
    """
    keras.utils.set_random_seed(experiment.seed)
    with scope or devices.scope(experiment.pipelining):
        model = experiment.build_model()
        model.optimizer.build(model.trainable_variables)
    print(tfgpipe.stage_table(model), flush=True)
    return model


def show_mesh(model: tfgpipe.PipelinedModel, folder: Path | None) -> None:
    """Shows which device holds what: as a picture in a folder, or printed.

    Args:
        model: The model, its optimizer built.
        folder: Where to write `mesh.png`, or None to print.
    """
    grid = device_memory(model)
    if folder is None:
        print(f"\n{draw_memory(grid)}", flush=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    tfgpipe.plot_mesh(grid, path=folder / "mesh.png")
    print(f"\nWho holds what is drawn in {folder / 'mesh.png'}.", flush=True)


def print_plan(experiment: Experiment, model: tfgpipe.PipelinedModel) -> None:
    """Prints the schedule, and what each stage costs."""
    print(f"\n{model.schedule.name}\n{draw(model.schedule)}", flush=True)
    plan = model.plan(batch_size=experiment.training.batch_size)
    print(f"\n{plan}", flush=True)
