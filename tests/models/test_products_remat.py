"""`remat="products"`: results of products are saved, the rest is recomputed."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tests.helpers.marks import nightly
from tfgpipe import remat
from tfgpipe.costs import profiler
from tfgpipe_params.lm.transformer import Block

layers = keras.layers
GIVEN = {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b"}


def model():
    inputs = keras.Input((6, 8))
    x = inputs
    for _ in range(2):
        x = Block(width=8, num_heads=2, mlp_width=16, dropout=0.0)(x)
    return keras.Model(inputs, layers.Dense(8)(x))


def data(rows=8):
    return np.random.default_rng(0).normal(size=(rows, 6, 8)).astype("float32")


@pytest.mark.parametrize("schedule", nightly(["1f1b"], gate=["zero_bubble"]))
@pytest.mark.parametrize(
    "policy", ["products", remat.ProductsRemat(ops=("MatMul", "Softmax"))], ids=str
)
def test_it_trains_as_the_plain_model_and_is_saved(schedule, policy, tmp_path):
    pair = compare.model_pair(model, **{**GIVEN, "schedule": schedule}, remat=policy)
    x = data()
    compare.train_alike(pair, x, x, 8)
    loaded = compare.reloaded(pair[1], tmp_path)
    assert loaded.config.remat == remat.find(policy)
    compare.close(
        *(each.predict(x, verbose=0) for each in (pair[1], loaded)),
        "outputs",
        1e-6,
        1e-7,
    )


def test_it_holds_less_than_everything_and_computes_next_to_nothing_again():
    plans = {
        name: tfgpipe.plan(model(), **GIVEN, remat=name, batch_size=8)
        for name in ("none", "products", "stage")
    }
    held = {name: max(plan.device_bytes) for name, plan in plans.items()}
    assert held["stage"] < held["products"] < held["none"]
    kept = plans["products"].costs.kept_bytes
    assert sum(kept) < 0.7 * sum(plans["none"].costs.kept_bytes)
    again = {name: sum(plan.costs.recompute) for name, plan in plans.items()}
    assert 0 < again["products"] < 0.25 * again["stage"]


def test_measured_time_counts_what_is_recomputed(monkeypatch):
    def work(function, *args):
        """Counts a call's operations as its seconds, which no other load changes."""
        return 1.0 * len(getattr(function, "function", function).graph.get_operations())

    monkeypatch.setattr(profiler, "_min_seconds", work)

    def seconds(policy):
        plan = tfgpipe.plan(
            model(), **GIVEN, remat=policy, balance="time", sample=data()
        )
        return [layer.seconds for layer in plan.profile.layers]

    assert all(x.recompute is None for x in seconds("stage"))
    found = seconds("products")
    assert all(0 <= x.again <= x.forward for x in found)
    assert 0 < found[0].again < found[0].forward  # A block's softmax, not its products.


def test_the_planner_counts_it_where_the_model_was_read_for_it():
    sizes = {"num_replicas": 1, "num_devices": 2, "num_shards": 1}
    read = tfgpipe.planner.read(model())
    device = tfgpipe.planner.TABLE["h100-80g"]

    def estimate(policy, workload=read):
        request = tfgpipe.planner.PlanRequest(
            workload, device=device, num_devices=2, batch_size=8
        )
        config = tfgpipe.planner.ParallelConfig(
            **sizes, num_microbatches=4, schedule="1f1b", remat=policy
        )
        return request.estimate(config, (2, 1))

    found = {name: estimate(name) for name in ("none", "products", "stage")}
    held = {name: each.memory[0].total for name, each in found.items()}
    assert held["stage"] < held["products"] < held["none"]
    again = {name: each.time.recompute for name, each in found.items()}
    assert again["none"] == 0 < again["products"] < again["stage"]
    own = remat.ProductsRemat(ops=("MatMul",))
    with pytest.raises(ValueError, match=r"remat=remat"):
        estimate(own)
    estimate(own, tfgpipe.planner.read(model(), remat=own))
