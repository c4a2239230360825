"""An experiment's model, ready to train."""

from __future__ import annotations

import keras

import tfgpipe
from params.experiment import Experiment
from trainer import devices


def build(experiment: Experiment) -> keras.Model:
    """Returns the model with its optimizer's slots made, and prints its stages."""
    keras.utils.set_random_seed(experiment.seed)
    with devices.scope(experiment.pipelining):
        model = experiment.build_model()
        model.optimizer.build(model.trainable_variables)
    print(tfgpipe.stage_table(model), flush=True)
    return model


def print_plans(experiment: Experiment, model: keras.Model) -> None:
    """Prints what each stage of each pipeline costs."""
    for layer in model.layers:
        if isinstance(layer, tfgpipe.PipelinedLayer):
            plan = layer.plan(batch_size=experiment.training.batch_size)
            print(f"\n{layer.name}: {plan}", flush=True)
