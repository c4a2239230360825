"""A kind of action of one's own: it records the bytes in flight before a backward."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.planner_toys import config, request, workload
from tfgpipe import schedules, simulation
from tfgpipe.schedules.kinds import BACKWARD, BACKWARD_INPUT


@keras.saving.register_keras_serializable(package="own")
class Recording(schedules.ActionKind):
    def run(self, step, action):
        k = action.stage
        held = [x for some in step.saved(k).values() for x in some.values()]
        rows = {f"{i}": x for i, x in enumerate(held) if x.shape[:1] == [4]}

        def record(tensors):
            size = sum(tf.size(x) * x.dtype.size for x in tensors.values())
            return [tf.py_function(lambda n: SEEN.append((k, int(n))), [size], [])]

        step.emit(action, rows, record)


RECORD = Recording("record", "R", "record bytes", "#000000", is_backward=True)
SEEN = []


def model(dense=keras.layers.Dense):
    return keras.Sequential([keras.Input((8,)), *(dense(8, "tanh") for _ in "123456")])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_it_runs_is_timed_simulated_planned_and_saved(name, tmp_path):
    sizes = {"num_stages": 3, "num_microbatches": 4}
    plan = schedules.make(name, **sizes)
    plan = plan.insert_before(RECORD, BACKWARD, BACKWARD_INPUT)
    pair = compare.model_pair(model, schedule=plan, remat="none", **sizes)
    x, y = np.random.default_rng(0).normal(size=(2, 16, 8)).astype("float32")
    timed = tfgpipe.TimelineCallback(tmp_path, steps=(1, 1))
    compare.train_alike(pair, x, y, 16, epochs=1, callbacks=[timed])
    most = [max(n for k, n in SEEN[-12:] if k == stage) for stage in (0, 1)]
    # Of each microbatch the input and two outputs, and until W more.
    assert most == [n * 3 * 128 for n in plan.in_flight[:2]] or name == "zero_bubble"
    again = tfgpipe.simulate(plan, simulation.costs_of(timed.timeline)).timeline
    assert all("R record bytes" in str(step) for step in (timed.timeline, again))
    assert str(simulation.trace_events(again)).count("'cat': 'record'") == 12
    assert pair[1].plan(batch_size=16).settings.schedule is plan
    planned = config(schedule=plan, num_devices=3, num_microbatches=4)
    assert request(workload(3)).estimate(planned).time.pipeline > 0
    assert compare.reloaded(pair[1], tmp_path).schedule == plan
