"""`tests/distribution/test_data_parallel.py` with more replicas and optimizers."""

from __future__ import annotations

import keras
import pytest

import tfgpipe
from tests.distribution import test_data_parallel as short

CASES = [
    # D, K, M, schedule, remat
    (2, 2, 2, "gpipe", "stage"),
    (2, 2, 4, "1f1b", "none"),
    (2, 3, 3, "zero_bubble", "none"),
    (4, 1, 2, "gpipe", "none"),
    (1, 4, 4, "1f1b", "except_last"),
]


@pytest.mark.parametrize(("d", "k", "m", "schedule", "remat"), CASES)
def test_replicas_are_one_that_has_all_rows(floatx, d, k, m, schedule, remat):
    short.test_replicas_are_one_that_has_all_rows(
        floatx, d, k, m, schedule, remat, measures=True
    )


def test_rows_weigh_alike_whatever_their_replica(floatx):
    short.test_rows_weigh_alike_whatever_their_replica(floatx, 2)


def test_a_batch_smaller_than_the_number_of_replicas(floatx):
    short.test_a_batch_smaller_than_the_number_of_replicas(floatx, 4)


OPTIMIZERS = {
    "decay": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "averages of all": lambda: keras.optimizers.Adam(
        0.05, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=2
    ),
    "scaled on all": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05), dynamic_growth_steps=3
    ),
    "clipnorm": lambda: keras.optimizers.Adam(0.05, clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.01),
    "global_clipnorm": short.momentum,
    "accumulation": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2),
    "averages": lambda: keras.optimizers.Adam(
        0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05, global_clipnorm=0.1), dynamic_growth_steps=3
    ),
    "schedule": lambda: keras.optimizers.Adam(
        # Others are computed in single precision.
        keras.optimizers.schedules.PiecewiseConstantDecay([3, 7], [0.05, 0.03, 0.01])
    ),
    # Those whose arithmetic is of a whole weight, not of its entries one by one.
    "adafactor": lambda: keras.optimizers.Adafactor(0.05),
    "lamb": lambda: keras.optimizers.Lamb(0.05),
}
SHARED = {
    "clipvalue": "slots",
    "global_clipnorm": "weights",
    "accumulation": "slots",
    "averages": "weights",
    "scaled": "slots",
    "adafactor": "whole_weights",
    "lamb": "slots",
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_work_on_what_all_replicas_sum_up_to(floatx, name):
    floatx("float64")
    strategy = tfgpipe.PipelineStrategy(
        num_stages=2, num_replicas=2, shard_replicas=SHARED.get(name, "none")
    )
    optimizer = OPTIMIZERS[name]
    replicated = short.made(optimizer, strategy=strategy)
    short.assert_trains_the_same(short.made(optimizer), replicated, measures=False)


@pytest.mark.usefixtures("mixed_precision")
def test_half_precision():
    short.test_half_precision("none")


def test_a_loop_of_ones_own(floatx):
    short.test_a_loop_of_ones_own(floatx, "reduce")


def test_losses_of_several_outputs_weigh_rows_alike_eagerly(floatx):
    short.test_losses_of_several_outputs_weigh_rows_alike(floatx, eagerly=True)
