"""Schedules found by search, or in larger groups, train as the plain model."""

import dataclasses

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare

COSTS = tfgpipe.Costs(forward=[1.8, 1.6, 1.1], backward=[1.8, 2.5, 2.2], latency=0.2)


def model():
    sizes = (12, 8, 24, 4)
    dense = [keras.layers.Dense(n, activation="tanh") for n in sizes]
    return keras.Sequential([keras.Input((16,)), *dense])


@pytest.mark.parametrize("splits", [False, True])
def test_a_schedule_that_was_found_trains_as_the_plain_model(splits):
    found = tfgpipe.best_schedule(COSTS, range(3), 6, splits_backwards=splits)
    pair = compare.model_pair(
        model, num_stages=3, num_microbatches=6, schedule=found.schedule
    )
    x = np.random.default_rng(0).normal(size=(24, 16)).astype("float32")
    compare.train_alike(pair, x, x[:, :4], 24)


def test_larger_groups_train_as_the_plain_model_and_are_saved(tmp_path):
    order = dataclasses.replace(tfgpipe.schedules.interleaved, group_size=4)
    options = {"num_stages": 4, "num_microbatches": 8, "schedule": order}
    pair = compare.model_pair(model, devices=["CPU:0", "CPU:1"], **options)
    x = np.random.default_rng(0).normal(size=(24, 16)).astype("float32")
    compare.train_alike(pair, x, x[:, :4], 24)
    assert compare.reloaded(pair[1], tmp_path).config.schedule == order
