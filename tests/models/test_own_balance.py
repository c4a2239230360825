"""A balance of one's own: a function of a layer's cost."""

import dataclasses

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tfgpipe.partition import plans


@keras.saving.register_keras_serializable(package="own")
@dataclasses.dataclass(frozen=True)
class Activations(tfgpipe.Balance):
    name = "activations"
    per_layer: float = 0.0

    def layer_cost(self, layer):
        return layer.tensors.outputs + self.per_layer


@dataclasses.dataclass(frozen=True)
class WeightsAndLayers(tfgpipe.Balance):
    needs_trace = False

    def layer_cost(self, layer):
        return layer.weights.count + 1000


OPTIONS = {"num_stages": 2, "num_microbatches": 4}


def model():
    sizes = (64, 8, 8, 8, 8)
    dense = (keras.layers.Dense(n, activation="tanh") for n in sizes)
    return keras.Sequential([keras.Input((8,)), *dense])


def test_it_partitions_trains_and_is_saved(tmp_path):
    own = Activations(per_layer=1.0)
    plan = tfgpipe.plan(model(), balance=own, batch_size=32, **OPTIONS)
    # Bytes of 8 examples: 4 * 64 and 4 * 8 of each.
    assert plan.calls_per_stage == (1, 4)
    assert [stage.cost for stage in plan.stages] == [8 * 256 + 1, 4 * (8 * 32 + 1)]
    assert "balanced by activations" in str(plan)
    assert "FLOPs" in str(plan)
    pair = compare.model_pair(model, balance=own, **OPTIONS)
    x, y = np.random.default_rng(0).normal(size=(2, 16, 8)).astype("float32")
    compare.train_alike(pair, x, y, 8, epochs=1)
    loaded = compare.reloaded(pair[1], tmp_path)
    assert loaded.config.balance == own
    assert loaded.get_config()["balance"]["config"] == {"per_layer": 1.0}


def test_one_of_weights_alone_traces_nothing(monkeypatch):
    monkeypatch.delattr(plans.profiles, "profile_calls")
    layer = tfgpipe.PipelinedLayer(
        model().layers, balance=WeightsAndLayers(), **OPTIONS
    )
    layer.build((None, 8))
    # 576 + 520 + 2,000 and 3 * 1,072; by weights alone (1, 4) is even better.
    assert [len(stage.segment.calls) for stage in layer.stages] == [2, 3]


def test_names_are_saved_as_they_were():
    for name in ("params", "flops", "time", "memory"):
        layer = tfgpipe.PipelinedLayer(model().layers, balance=name, **OPTIONS)
        assert layer.get_config()["balance"] == name
    with pytest.raises(ValueError, match=r"`balance` must be one of .*'memory'.*'x'"):
        tfgpipe.PipelinedLayer(model().layers, balance="x", **OPTIONS)
