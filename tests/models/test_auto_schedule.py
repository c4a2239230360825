"""`schedule="auto"`: an order for the stages of the model, and the same steps."""

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tfgpipe import schedules, simulation

OPTIONS = {"num_microbatches": 6, "schedule": "auto"}
# The second stage has most products, the last nearly none.
PARTITION = (2, 1, 1)
X = np.random.default_rng(0).normal(size=(12, 16)).astype("float32")


def layers():
    return [keras.layers.Dense(n, activation="tanh") for n in (32, 64, 128, 16)]


def model():
    return keras.Sequential([keras.Input((16,)), *layers()])


def step_time(schedule, plan):
    return tfgpipe.simulate(schedule, plan.costs).timeline.step_time


@pytest.mark.parametrize("remat", ["none", "stage"])
def test_it_trains_as_the_plain_model_and_is_saved(remat, tmp_path):
    pair = compare.model_pair(model, partition=PARTITION, remat=remat, **OPTIONS)
    compare.train_alike(pair, X, X, 12)
    loaded = compare.reloaded(pair[1], tmp_path)
    assert loaded.config.schedule == simulation.AutoSchedule()
    assert loaded.schedule == pair[1].schedule


def test_layers_that_are_built_by_the_first_step_have_their_order_in_it():
    made = tfgpipe.PipelinedModel(layers(), partition=PARTITION, **OPTIONS)
    made.compile(keras.optimizers.SGD(0.1), "mse")
    made.fit(X, X, 12, verbose=0)
    same = tfgpipe.pipeline(model(), partition=PARTITION, **OPTIONS)
    assert made.schedule == same.schedule


@pytest.mark.parametrize("remat", ["none", "stage"])
def test_no_named_schedule_is_better_for_the_stages(remat):
    given = {"partition": PARTITION, "remat": remat, "sample": X}
    plan = tfgpipe.plan(model(), **given, **OPTIONS)
    assert plan.costs.forward[1] > 3 * plan.costs.forward[2]
    assert any(plan.costs.recompute) == (remat == "stage")
    found = plan.settings.schedule
    assert found.name == "auto"
    for name in ("gpipe", "1f1b", "zero_bubble", "eager_1f1b"):
        named = schedules.make(name, num_stages=3, num_microbatches=6)
        assert step_time(found, plan) <= step_time(named, plan) * (1 + 1e-9), name
    piped = tfgpipe.pipeline(model(), partition=PARTITION, remat=remat, **OPTIONS)
    assert step_time(piped.schedule, plan) == pytest.approx(step_time(found, plan))


def test_another_cut_has_another_order():
    piped = tfgpipe.pipeline(model(), partition=PARTITION, remat="none", **OPTIONS)
    before = piped.schedule
    tfgpipe.recut(piped, (1, 1, 2))
    plan = tfgpipe.plan(model(), partition=(1, 1, 2), remat="none", sample=X, **OPTIONS)
    assert piped.schedule == plan.settings.schedule != before


def test_stages_share_devices_as_they_are_given():
    devices = ["CPU:0", "CPU:1", "CPU:1", "CPU:0"]
    pair = compare.model_pair(model, num_stages=4, devices=devices, **OPTIONS)
    compare.train_alike(pair, X, X, 12, epochs=1)
    assert pair[1].schedule.placement == (0, 1, 1, 0)


def test_costs_that_are_given_are_those_that_count(tmp_path):
    costs = tfgpipe.Costs(forward=[1, 1, 5], backward=[2, 2, 10], latency=0.1)
    order = simulation.AutoSchedule(costs)
    piped = tfgpipe.pipeline(
        model(), partition=PARTITION, num_microbatches=6, schedule=order
    )
    best = tfgpipe.best_schedule(costs, range(3), 6)
    again = tfgpipe.simulate(piped.schedule, costs).timeline
    assert again.step_time == best.step_time
    assert compare.reloaded(piped, tmp_path).config.schedule == order


def test_a_memory_limit_that_no_order_keeps_is_refused():
    given = {"partition": PARTITION, "remat": "none", "sample": X}
    most = max(tfgpipe.plan(model(), **given, **OPTIONS).device_bytes)
    with pytest.raises(ValueError, match="memory_limit"):
        tfgpipe.plan(model(), **given, **OPTIONS, memory_limit=most / 3)


def test_what_fits_under_1f1b_fits(tmp_path):
    """The partition is chosen for an order that holds no more than 1F1B."""
    given = {"num_stages": 4, "num_microbatches": 8, "sample": X[:8]}
    usual = tfgpipe.plan(model(), **given, schedule="1f1b", balance="memory")
    limit = {"memory_limit": max(usual.device_bytes), "balance": "memory"}
    plan = tfgpipe.plan(model(), **given, schedule="auto", **limit)
    assert max(plan.device_bytes) <= limit["memory_limit"]
    assert plan.calls_per_stage == usual.calls_per_stage
    # The limit of a model is for a batch of 32.
    del given["sample"]
    usual = tfgpipe.plan(model(), **given, schedule="1f1b", balance="memory")
    limit["memory_limit"] = max(usual.device_bytes)
    piped = tfgpipe.pipeline(model(), **given, schedule="auto", **limit)
    assert max(piped.pipelined.plan().device_bytes) <= limit["memory_limit"]
    assert compare.reloaded(piped, tmp_path).schedule == piped.schedule


def test_stages_whose_costs_are_not_known_are_planned_with_a_mini_batch():
    def any_length():
        inputs = keras.Input((None, 16))
        x = inputs
        for n in (32, 16, 8):
            x = keras.layers.Dense(n)(x)
        return keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(x))

    given = {"num_stages": 2, "num_microbatches": 4}
    piped = tfgpipe.pipeline(any_length(), **given, schedule="auto")
    assert "schedule=auto" in repr(piped)
    x = np.zeros((8, 5, 16), "float32")
    piped.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"schedule=plan\.settings\.schedule"):
        piped.fit(x, x[:, 0, :8], 8, verbose=0)
    with pytest.raises(ValueError, match="Costs depend on all sizes"):
        assert piped.schedule  # Not one that is for no costs.
    plan = tfgpipe.plan(any_length(), **given, schedule="auto", sample=x)
    given["schedule"] = plan.settings.schedule
    piped = tfgpipe.pipeline(any_length(), partition=plan.calls_per_stage, **given)
    piped.compile("sgd", "mse")
    piped.fit(x, x[:, 0, :8], 8, verbose=0)


def test_costs_that_are_given_keep_their_recomputation():
    costs = tfgpipe.Costs(
        forward=[2, 4, 4],
        backward=[5, 1, 1],
        recompute=[1, 4, 1],
        recompute_when="early",
    )
    found = simulation.AutoSchedule(costs)(3, 3)
    best = tfgpipe.best_schedule(costs, range(3), 3)
    assert tfgpipe.simulate(found, costs).timeline.step_time == best.step_time


def test_a_plan_for_measured_times_has_an_order_for_them():
    plan = tfgpipe.plan(model(), num_stages=3, sample=X, **OPTIONS)
    again = plan.rebalance([1.0, 1.0, 9.0])
    best = tfgpipe.best_schedule(again.costs, range(3), 6)
    assert step_time(again.settings.schedule, again) == pytest.approx(best.step_time)
