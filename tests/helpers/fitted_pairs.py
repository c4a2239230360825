"""A plain and a pipelined model, fitted side by side on the same rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfgpipe
from tests.helpers import compare
from tests.helpers.layer_stacks import AddsLoss
from tests.helpers.zoo import floats, ids

layers = keras.layers
NUM_ROWS = 10  # In batches of 4, of which the last has 2, for 3 microbatches.
X, Y = floats(NUM_ROWS, 5), floats(NUM_ROWS, 3, seed=2)
WEIGHTS = np.arange(NUM_ROWS, dtype="float32")
PIPELINE = {"num_stages": 2, "num_microbatches": 3, "schedule": "1f1b"}
FIT = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}


def small() -> keras.Model:
    inputs = keras.Input((5,))
    x = layers.Dense(6, activation="tanh")(inputs)
    x = layers.Dense(4, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def sgd(**arguments: Any) -> keras.optimizers.Optimizer:
    # Plain SGD: Adam would blow a rounding difference up where gradients vanish.
    return keras.optimizers.SGD(**{"learning_rate": 0.05, **arguments})


def both(make, compiled, **arguments):
    """Returns the plain and the pipelined model, compiled each by itself."""
    compare.fresh_names()
    plain, pipelined = compare.model_pair(make, **{**PIPELINE, **arguments})
    for model in (plain, pipelined):
        model.compile(**compiled())
    run_eagerly_if_the_same(plain)
    return plain, pipelined


def run_eagerly_if_the_same(plain):
    """Spares a trace, which takes longer than some steps.

    Where the number of rows is unknown, as in a graph, Keras shows the loss of each of
    several outputs as the mean over batches, and not over rows as eagerly.
    """
    if not isinstance(plain, tfgpipe.PipelinedModel) and len(plain.outputs) == 1:
        plain.run_eagerly = True


def assert_fits_the_same(models, x, y=None, sample_weight=None, **fit):
    """Fits two models, and compares histories, weights and slots of optimizers."""
    arguments = {**FIT, "sample_weight": sample_weight, **fit}
    run_eagerly_if_the_same(models[0])
    assert_same_numbers(*(m.fit(x, y, **arguments).history for m in models))
    assert_same_variables(*models)


def assert_trains_the_same(models, x, y=None, sample_weight=None, **fit):
    """Fits, evaluates and predicts with two models, and compares all that comes."""
    assert_fits_the_same(models, x, y, sample_weight, **fit)
    arguments = {"batch_size": 4, "verbose": 0}
    weighted = {**arguments, "sample_weight": sample_weight, "return_dict": True}
    assert_same_numbers(*(m.evaluate(x, y, **weighted) for m in models))
    assert_same_numbers(*(m.predict(x, **arguments) for m in models))


def assert_same_numbers(expected, received):
    keras.tree.assert_same_structure(expected, received)
    flat = zip(keras.tree.flatten(expected), keras.tree.flatten(received), strict=True)
    for a, b in flat:
        compare.close(np.asarray(a), np.asarray(b), "result", compare.RTOL, 1e-5)


def assert_same_variables(plain, pipelined):
    """Of models and their optimizers."""
    compare.assert_close(plain.variables, pipelined.variables, compare.RTOL, 1e-5)
    if plain.optimizer is not None:
        slots = (model.optimizer.variables for model in (plain, pipelined))
        compare.assert_close(*slots, compare.RTOL, 1e-5)


def two_outputs() -> tuple:
    x = {"a": floats(NUM_ROWS, 4), "b": floats(NUM_ROWS, 3)}
    return x, {"price": floats(NUM_ROWS, 1), "kind": ids(NUM_ROWS, 1) % 3}


def regularised() -> keras.Model:
    inputs = keras.Input((5,))
    x = layers.Dense(6, kernel_regularizer="l2", activity_regularizer="l1")(inputs)
    x = layers.Dense(4, activation="tanh", bias_regularizer="l1")(AddsLoss()(x))
    return keras.Model(inputs, layers.Dense(3, kernel_regularizer="l2")(x))
