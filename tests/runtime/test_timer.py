"""Readings of the clock, and the timelines made of them."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers.marks import nightly
from tfgpipe import schedules
from tfgpipe.distribution.single_replica import SingleReplica
from tfgpipe.runtime.timer import TimingRecorder, make_timeline
from tfgpipe.schedules.schedule import Action
from tfgpipe.simulation.timeline import Timeline


class Busy(keras.layers.Layer):
    """Passes on what it gets after some arithmetic that takes a while."""

    def call(self, x):
        square = tf.eye(300) + 1e-9 * tf.reduce_sum(x)
        for _ in range(6):
            square = square @ square
        return x + 0.0 * square[0, 0]


def recorded(schedule: str, *, remat: str = "none", rows: int = 8) -> Timeline:
    """Returns the second of two steps of two devices on four microbatches."""
    layers = [layer for _ in range(4) for layer in (Busy(), keras.layers.Dense(4))]
    model = tfgpipe.PipelinedModel(
        layers,
        num_stages=4 if schedule == "interleaved" else 2,
        num_microbatches=4,
        schedule=schedule,
        remat=remat,
        devices=["CPU:0", "CPU:1"],
    )
    model.compile("sgd", "mse")
    model.recorder = TimingRecorder()
    x = np.ones((rows, 4), "float32")
    for _ in range(2):
        model.train_on_batch(x, x)
    return model.recorder.timeline(model.schedule)


@pytest.mark.parametrize(
    "schedule", nightly(["gpipe", "1f1b"], gate=["interleaved", "zero_bubble"])
)
def test_a_recorded_step_follows_its_schedule(schedule):
    step = recorded(schedule)
    ran = {(s.kind.name, s.stage, s.microbatch): s for s in step.spans}
    orders = step.schedule.orders
    assert len(ran) == len(step.spans) == sum(map(len, orders))
    for device, order in enumerate(orders):
        spans = [ran[a.kind.name, a.stage, a.microbatch] for a in order]
        assert all(span.device == device for span in spans)
        for before, after in itertools.pairwise(spans):
            assert before.end <= after.start
        for action, span in zip(order, spans, strict=True):
            for needed in step.schedule.dependencies(action):
                done = ran[needed.kind.name, needed.stage, needed.microbatch]
                # Its end may be read late: its results go on before.
                assert done.start <= span.start


def test_timing_lets_devices_work_at_the_same_time():
    """TensorFlow orders what reads the clock, unless it names different resources."""
    step = recorded("gpipe")
    by_device = [[s for s in step.spans if s.device == p] for p in range(2)]
    together = [
        min(a.end, b.end) - max(a.start, b.start)
        for a in by_device[0]
        for b in by_device[1]
    ]
    assert max(together) > 0


def test_what_is_recomputed_lasts_as_long_as_its_forward_and_comes_first():
    step = recorded("1f1b", remat="stage")
    forwards = {
        (s.stage, s.microbatch): s for s in step.spans if s.kind.name == "forward"
    }
    again = [s for s in step.spans if s.kind.name == "recompute"]
    assert len(again) == 8
    for span in again:
        backward = next(
            s
            for s in step.spans
            if s.kind.name == "backward"
            and (s.stage, s.microbatch) == (span.stage, span.microbatch)
        )
        assert span.end == backward.start
        forward = forwards[span.stage, span.microbatch]
        assert span.duration <= forward.duration + 1e-9


def test_a_short_batch_has_the_actions_of_its_microbatches():
    step = recorded("1f1b", rows=3)
    assert step.schedule.num_microbatches == 3
    assert {s.microbatch for s in step.spans} == {0, 1, 2}


def test_steps_of_fewer_rows_are_read_with_actions_of_their_own():
    model = small()
    # The second trace is for any number of rows, and may serve the third step.
    for rows, expected in ((3, {3}), (8, {4}), (3, {3, 4}), (8, {4})):
        x = np.ones((rows, 4), "float32")
        model.train_on_batch(x, x)
        step = model.recorder.timeline(model.schedule)
        assert step.schedule.num_microbatches in expected
        assert len(step.spans) == 2 * 2 * step.schedule.num_microbatches


def test_a_process_that_has_not_the_first_replica_reads_its_own(monkeypatch):
    monkeypatch.setattr(SingleReplica, "replica_index", 1)
    model = small()
    x = np.ones((8, 4), "float32")
    model.train_on_batch(x, x)
    assert len(model.recorder.timeline(model.schedule).spans) == 16


def small() -> tfgpipe.PipelinedModel:
    model = tfgpipe.PipelinedModel(
        [keras.layers.Dense(4), keras.layers.Dense(4)],
        num_stages=2,
        num_microbatches=4,
        remat="none",
    )
    model.compile("sgd", "mse")
    model.recorder = TimingRecorder()
    return model


def test_readings_become_spans_that_start_at_zero_and_do_not_overlap():
    schedule = schedules.gpipe(1, 1)
    actions = {Action("forward", 0, 0): False, Action("backward", 0, 0): True}
    readings = np.array([[100.0, 102.0], [101.0, 107.0]])
    spans = make_timeline(schedule, actions, readings).spans
    assert [(s.kind.name, s.start, s.end) for s in spans] == [
        ("forward", 0, 2),
        ("recompute", 2, 4),
        ("backward", 4, 7),
    ]


def test_each_backward_recomputes_its_own_forward_and_at_most_until_it_ends():
    readings = {
        Action("forward", 0, 0): (0, 1),
        Action("forward", 0, 1): (1, 3),
        Action("forward", 1, 0): (1, 4),
        Action("forward", 1, 1): (4, 8),
        Action("backward", 1, 1): (8, 20),
        Action("backward", 1, 0): (20, 22),  # Shorter than its forward.
        Action("backward", 0, 1): (20, 25),
        Action("backward", 0, 0): (25, 30),
    }
    recomputes = {action: action.kind.is_backward for action in readings}
    step = make_timeline(
        schedules.gpipe(2, 2), recomputes, np.array([*readings.values()], float)
    )
    again = [span for span in step.spans if span.kind.name == "recompute"]
    assert {(s.stage, s.microbatch): (s.start, s.end) for s in again} == {
        (1, 1): (8, 12),
        (1, 0): (20, 22),
        (0, 1): (20, 22),
        (0, 0): (25, 26),
    }


def test_a_recorder_without_a_step_says_so():
    with pytest.raises(RuntimeError, match="No step has been timed yet"):
        TimingRecorder().timeline(schedules.gpipe(1, 1))


def test_an_untimed_step_reads_no_clock():
    model = tfgpipe.PipelinedModel(
        [keras.layers.Dense(2), keras.layers.Dense(2)], num_stages=2, num_microbatches=2
    )
    model.compile("sgd", "mse")
    x = tf.ones((4, 2))
    plain = tf.function(model.train_step, autograph=False)
    model.recorder = TimingRecorder()
    timed = tf.function(model.train_step, autograph=False)

    def readings(step) -> int:
        graph = step.get_concrete_function((x, x)).graph.as_graph_def()
        functions = [f.node_def for f in graph.library.function]
        nodes = [node for nodes in (graph.node, *functions) for node in nodes]
        return sum(node.op == "Timestamp" for node in nodes)

    assert readings(timed) == 1  # In a function that all readings call.
    model.recorder = None
    assert readings(plain) == 0
