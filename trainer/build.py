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
