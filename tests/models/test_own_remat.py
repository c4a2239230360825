"""A rematerialisation policy of one's own: every second layer's output is kept."""

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tests.helpers.planner_toys import TOY, workload
from tfgpipe import planner, simulation


@keras.saving.register_keras_serializable(package="own")
class KeepEverySecond(tfgpipe.remat.Remat):
    name = "every_second"
    keeps_all = True

    def segment(self, num_layers):
        return 2


OWN = KeepEverySecond()


def model():
    dense = (keras.layers.Dense(16, activation="tanh") for _ in range(12))
    return keras.Sequential([keras.Input((16,)), *dense])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_it_trains_as_the_plain_model_and_is_timed_and_saved(schedule, tmp_path):
    options = {"num_stages": 3, "num_microbatches": 4, "schedule": schedule}
    pair = compare.model_pair(model, remat=OWN, **options)
    x, y = np.random.default_rng(0).normal(size=(2, 32, 16)).astype("float32")
    timed = tfgpipe.TimelineCallback(tmp_path, steps=(2, 2))
    compare.train_alike(pair, x, y, 16, epochs=1, callbacks=[timed])
    step = timed.timeline
    again = tfgpipe.simulate(step.schedule, simulation.costs_of(step)).timeline
    assert "r recompute" in str(step) and "r recompute" in str(again)  # noqa: PT018
    assert "'cat': 'recompute'" in str(simulation.trace_events(step))
    assert compare.reloaded(pair[1], tmp_path).config.remat == OWN


def test_it_is_planned_by_what_it_holds_and_repeats():
    sizes = {"num_stages": 1, "num_microbatches": 4, "batch_size": 64, "num_slots": 0}
    plans = (tfgpipe.plan(model(), remat=r, **sizes) for r in ("none", "stage", OWN))
    none, stage, own = (plan.stages[0] for plan in plans)
    saved = (none.memory_bytes - stage.memory_bytes) / (4 * 12 - 12)  # Of a layer.
    # Of 4 microbatches in flight 5 values each.
    assert own.memory_bytes == stage.memory_bytes + 4 * 5 * 1024 - 10 * saved
    assert own.flops == stage.flops > none.flops
    request = {"device": TOY, "num_devices": 2, "batch_size": 8, "remats": [OWN]}
    assert planner.search(workload(8), **request).best[0].config.remat == OWN
