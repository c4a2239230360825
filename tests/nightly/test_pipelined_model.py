"""`tests/models/test_pipelined_model.py` in full: each option by itself."""

from __future__ import annotations

import itertools

import keras
import pytest

from tests.models import test_pipelined_model as short
from tfgpipe import schedules

EMA = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 4}
OPTIMIZERS = {
    "momentum": lambda: short.sgd(momentum=0.9, nesterov=True),
    "clipnorm": lambda: short.sgd(clipnorm=0.1),
    "global_clipnorm": lambda: short.sgd(global_clipnorm=0.1),
    "clipvalue": lambda: short.sgd(clipvalue=0.05),
    "weight decay": lambda: short.sgd(weight_decay=0.1),
    "accumulated gradients": lambda: short.sgd(gradient_accumulation_steps=2),
    "moving averages": lambda: short.sgd(**EMA),
    "scaled loss": lambda: short.sgd(loss_scale_factor=64.0),
    "decaying rate": lambda: short.sgd(
        learning_rate=keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_optimizer_makes_the_plain_models_updates(make):
    short.test_any_optimizer_makes_the_plain_models_updates(make)


@pytest.mark.parametrize(
    ("name", "schedule"),
    list(zip(short.SETTINGS, itertools.cycle(schedules.NAMES[:4]), strict=False)),
)
def test_whatever_is_compiled(name, schedule):
    short.test_whatever_is_compiled(name, schedule)


def test_outputs_from_two_stages():
    short.test_losses_and_metrics_by_the_names_of_outputs(2)


def test_sample_weights_for_all_outputs():
    short.test_losses_in_a_list_and_sample_weights("one for all")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pydataset_is_taken_in_the_order_of_the_plain_model(workers, shuffle):
    short.test_a_pydataset_is_taken_in_the_order_of_the_plain_model(workers, shuffle)
