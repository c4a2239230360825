"""Policies that save some results: by what pays, and by name."""

from __future__ import annotations

import dataclasses
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.marks import nightly
from tfgpipe import remat
from tfgpipe.stage import StageFunctions
from tfgpipe_params.lm.transformer import Block

layers = keras.layers
GIVEN = {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b"}


class Named(layers.Layer):
    """Two dense layers; what the first makes has a name."""

    def __init__(self, units=8, **arguments):
        super().__init__(**arguments)
        self.first, self.second = (layers.Dense(units, "tanh") for _ in range(2))

    def call(self, x):
        return self.second(tf.identity(self.first(x), name="hidden"))


def blocks(width=8, count=4):
    inputs = keras.Input((6, width))
    x = inputs
    for i in range(count):
        x = Block(
            width=width, num_heads=2, mlp_width=16, dropout=0.1, name=f"block_{i}"
        )(x)
    return keras.Model(inputs, layers.Dense(8)(x))


def named():
    inputs = keras.Input((6, 8))
    x = inputs
    for _ in range(4):
        x = Named()(x)
    return keras.Model(inputs, layers.Dense(8)(x))


def data(rows=8):
    return np.random.default_rng(0).normal(size=(rows, 6, 8)).astype("float32")


def plain_blocks():
    """Without dropout, which plain Keras draws for the whole mini-batch at once."""
    model = blocks()
    for layer in model.layers:
        for each in layer._flatten_layers():
            if isinstance(each, layers.Dropout):
                each.rate = 0.0
    return model


@pytest.mark.parametrize(
    "schedule", nightly(["gpipe", "zero_bubble", "interleaved"], gate=["1f1b"])
)
@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (plain_blocks, remat.AutoRemat(flops_per_byte=40)),
        (plain_blocks, remat.AutoRemat(flops_per_byte=math.inf)),
        (plain_blocks, remat.NamesRemat(("*/multi_head_attention*/*", "block_3/*"))),
        (named, remat.NamesRemat(("*/hidden",))),
    ],
)
def test_it_trains_as_the_plain_model_and_is_saved(make, policy, schedule, tmp_path):
    stages = 4 if schedule == "interleaved" else 2
    options = GIVEN | {"schedule": schedule, "num_stages": stages}
    pair = compare.model_pair(make, **options, remat=policy)
    x = data()
    compare.train_alike(pair, x, x, 8)
    custom = {"Named": Named}
    loaded = compare.reloaded(pair[1], tmp_path, custom_objects=custom)
    assert loaded.config.remat == policy


def saved_by_stage(model, x, monkeypatch):
    """Trains on a batch, and returns what forwards of each stage saved."""
    found = {}
    residuals = StageFunctions.residuals.func

    def spy(self):
        names = residuals(self)
        if not self._saves:
            found[id(self._trace)] = self, names
        return names

    spied = type(StageFunctions.residuals)(spy)
    spied.__set_name__(StageFunctions, "residuals")
    monkeypatch.setattr(StageFunctions, "residuals", spied)
    model.compile("sgd", "mse")
    model.train_on_batch(x, x)
    return found


def test_names_are_those_of_layers_and_of_tensors_in_them(monkeypatch):
    pipelined = tfgpipe.pipeline(
        named(), **GIVEN, remat=remat.NamesRemat(("*/hidden",))
    )
    found = saved_by_stage(pipelined, data(), monkeypatch)
    assert len(found) == 2
    for names in (names for _, names in found.values()):
        assert names
        assert all("/hidden" in name for name in names)


def test_a_name_that_nothing_has_is_told_with_those_there_are():
    pipelined = tfgpipe.pipeline(named(), **GIVEN, remat=remat.NamesRemat(("*/hid",)))
    pipelined.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"'\*/hid'.* names begin with named"):
        pipelined.train_on_batch(data(), data())


@pytest.mark.nightly
def test_the_limit_of_a_pipeline_is_kept_and_too_little_told():
    """A plan is for 32 examples; of a mini-batch of more only the step knows."""
    for rows in (8, 4096):
        pipelined = tfgpipe.pipeline(blocks(), **GIVEN, remat="auto", memory_limit=2e5)
        pipelined.compile("sgd", "mse")
        x = data(rows)
        if rows == 8:
            pipelined.train_on_batch(x, x)
        else:
            with pytest.raises(ValueError, match="memory_limit=200,000"):
                pipelined.train_on_batch(x, x)


@pytest.mark.nightly
def test_a_batch_of_any_size_needs_no_limit_and_has_none():
    for limit, expected in ((None, None), (1e9, "drop_remainder=True")):
        pipelined = tfgpipe.pipeline(
            blocks(), **GIVEN, remat="auto", memory_limit=limit
        )
        pipelined.compile("sgd", "mse")
        dataset = tf.data.Dataset.from_tensor_slices((data(10), data(10))).batch(4)
        if expected:
            with pytest.raises(ValueError, match=expected):
                pipelined.fit(dataset, verbose=0)
        else:
            pipelined.fit(dataset, verbose=0)


@pytest.mark.nightly
def test_plans_count_what_a_price_saves_and_auto_as_no_more_than_the_stage():
    def plan(policy):
        return tfgpipe.plan(blocks(), **GIVEN, remat=policy, batch_size=8)

    plans = {price: plan(remat.AutoRemat(price)) for price in (0.0, 30.0, 1e9)}
    stage, auto = plan("stage"), plan("auto")
    assert dataclasses.replace(auto.costs, recompute=stage.costs.recompute) == (
        stage.costs
    )
    both = [*zip(auto.costs.recompute, stage.costs.recompute, strict=True)]
    assert all(ours <= whole for ours, whole in both)
    assert max(auto.device_bytes) <= max(stage.device_bytes)
    kept = [sum(each.costs.kept_bytes) for each in plans.values()]
    again = [sum(each.costs.recompute) for each in plans.values()]
    assert kept == sorted(kept, reverse=True)
    assert again == sorted(again)
    assert kept[0] > kept[1] > kept[2] == sum(stage.costs.kept_bytes)
    assert again[0] < 0.01 * sum(stage.costs.recompute)


def test_what_is_saved_is_chosen_once_for_many_eager_steps(monkeypatch):
    chosen = []
    for_stages = remat.AutoRemat.for_stages

    def counted(self, num_stages, devices):
        chosen.append(num_stages)
        return for_stages(self, num_stages, devices)

    monkeypatch.setattr(remat.AutoRemat, "for_stages", counted)
    stack = [layers.Dense(8, activation="tanh") for _ in range(4)]
    layer = tfgpipe.PipelinedLayer(
        stack, num_stages=2, num_microbatches=2, remat="auto"
    )
    for rows in (4, 4, 8, 4):
        with tf.GradientTape() as tape:
            loss = compare.squares(layer(tf.ones((rows, 8)), training=True))
        tape.gradient(loss, layer.trainable_variables)
    assert chosen == [2, 2]  # Once for each size.
