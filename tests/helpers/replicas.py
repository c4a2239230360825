"""Replicas of a pipeline beside one plain model that has all their rows."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tests.helpers import compare

layers = keras.layers
RNG = np.random.default_rng(0)
# In batches of 8 the last has 6: on three replicas 3, 3, 2 rows, then 2, 2, 2; on four
# replicas all twos, then 2, 2, 2 and none.
ROWS = 22
X, Y = RNG.normal(size=(ROWS, 6)), RNG.normal(size=(ROWS, 3))
WEIGHTS = RNG.uniform(0.1, 2.0, ROWS)
# Adam divides by the roots of squares that may be small: a few digits are lost.
RTOL, ATOL = 1e-9, 1e-11


def stack():
    return [
        layers.Dense(8, activation="tanh"),
        layers.Dense(8, activation="tanh", activity_regularizer="l2"),
        layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
        layers.Dense(3),
    ]


def short_stack():
    regularizers = {"kernel_regularizer": "l2", "activity_regularizer": "l2"}
    return [layers.Dense(8, activation="tanh", **regularizers), layers.Dense(3)]


def adam():
    return keras.optimizers.Adam(0.05)


def made(optimizer=adam, make=stack, strategy=None, compiled=None, **arguments):
    """Returns a model, plain without a strategy, else a pipeline in its scope."""
    compare.fresh_names()
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        if strategy is None:
            model = keras.Sequential(make())
        else:
            arguments = {"num_microbatches": 2, "schedule": "1f1b", **arguments}
            model = tfgpipe.PipelinedModel(make(), **arguments)
        model.build((None, 6))
        model.compile(optimizer(), **(compiled or {"loss": "mse", "metrics": ["mae"]}))
    return model


def strategy_of(num_replicas=2, shares="weights", num_stages=2, **arguments):
    sizes = {"num_stages": num_stages, "num_replicas": num_replicas}
    return tfgpipe.PipelineStrategy(shard_replicas=shares, **sizes, **arguments)


def loaded_whole(model, make, strategy, folder):
    """Compares a saved model with what one pipeline, and replicas, load of it.

    Returns:
        The model of a strategy's replicas.
    """
    model.save(folder / "model.keras")
    tf.train.Checkpoint(model=model).write(str(folder / "checkpoint"))
    expected = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    with tfgpipe.PipelineStrategy(num_stages=2).scope():
        loaded = keras.saving.load_model(folder / "model.keras")
    other = made(make=make, strategy=strategy)
    with strategy.scope():
        other.optimizer.build(other.trainable_variables)
        tf.train.Checkpoint(model=other).read(str(folder / "checkpoint"))
    for found in (loaded, other):
        compare.assert_equal(expected, [*found.variables, *found.optimizer.variables])
    return other


def assert_trains_the_same(plain, replicated, *, epochs=4, measures=True, **fit):
    """Compares losses, metrics, weights, and all that the optimizers keep."""
    data = {"x": X, "y": Y, "batch_size": 8}
    data.update(fit)
    found = []
    plain.run_eagerly = True  # To trace it takes longer than some steps.
    for model in (plain, replicated):
        history = model.fit(shuffle=False, epochs=epochs, verbose=0, **data).history
        found.append([history])
        if measures:
            scores = model.evaluate(**data, return_dict=True, verbose=0)
            rows = {"x": data["x"], "batch_size": data["batch_size"]}
            found[-1] += [scores, model.predict(**rows, verbose=0)]
    for expected, received in zip(*found, strict=True):
        for a, b in zip(*map(keras.tree.flatten, (expected, received)), strict=True):
            np.testing.assert_allclose(a, b, RTOL, ATOL)
    pairs = [(plain.variables, replicated.variables)]
    pairs += [(plain.optimizer.variables, replicated.optimizer.variables)]
    strategy = replicated.distribute_strategy
    for expected, received in pairs:
        for a, b in zip(expected, received, strict=True):
            for copy in strategy.experimental_local_results(b.value):
                compare.close(a.numpy(), copy.numpy(), a.path, RTOL, ATOL)
