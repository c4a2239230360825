"""An experiment's model, ready to train."""

from __future__ import annotations

import keras

import tfgpipe
from params.experiment import Experiment
from tfgpipe import schedule
from trainer import devices


def build(experiment: Experiment) -> tfgpipe.PipelinedModel:
    """Returns the model with its optimizer's slots made, and prints its stages."""
    keras.utils.set_random_seed(experiment.seed)
    with devices.scope(experiment.pipelining):
        model = experiment.build_model()
        model.optimizer.build(model.trainable_variables)
    print(tfgpipe.stage_table(model), flush=True)
    return model


def print_plan(experiment: Experiment, model: tfgpipe.PipelinedModel) -> None:
    """Prints the schedule, and what each stage costs."""
    print(f"\n{model.schedule.name}\n{schedule.draw(model.schedule)}", flush=True)
    plan = model.plan(batch_size=experiment.training.batch_size)
    print(f"\n{plan}", flush=True)
