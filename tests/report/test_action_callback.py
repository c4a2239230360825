"""Calls on the host before and after the actions of steps under `fit`."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tfgpipe import TimelineCallback

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")


def layers():
    return [keras.layers.Dense(n, activation="tanh") for n in (6, 5, 4)]


def plain():
    return keras.Sequential([keras.Input((4,)), *layers()])


class Seen(tfgpipe.ActionCallback):
    def __init__(self):
        super().__init__()
        self.calls, self.gradients, self.lock = [], [], threading.Lock()

    def on_action_begin(self, action):
        with self.lock:
            self.calls.append(("begin", action))

    def on_action_end(self, action):
        with self.lock:
            self.calls.append(("end", action))

    def on_stage_gradients(self, k, gradients):
        self.gradients.append((k, gradients))


def fit(model, *callbacks, epochs=1):
    model.fit(X, X, 16, shuffle=False, epochs=epochs, callbacks=[*callbacks], verbose=0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_each_action_is_seen_in_the_order_of_its_device_and_nothing_changes(name):
    sizes = {"num_stages": 3, "num_microbatches": 4, "schedule": name}
    pair = compare.model_pair(plain, **sizes)
    seen = Seen()
    compare.train_alike(pair, X, X, 16, callbacks=[seen])
    schedule = pair[1].schedule
    for order, p in zip(schedule.orders, range(3), strict=True):
        mine = [x for x in seen.calls if schedule.placement[x[1].stage] == p]
        expected = [(when, x) for x in order for when in ("begin", "end")]
        assert mine == 2 * expected
    # And no action begins before those that it waits for.
    first = seen.calls[: len(seen.calls) // 2]
    for when, action in first:
        before = first[: first.index((when, action))]
        if when == "begin":
            needs = schedule.dependencies(action)
            assert {("begin", x) for x in needs} <= {*before}


def test_gradients_of_stages_are_those_of_the_plain_model():
    pair = compare.model_pair(plain, num_stages=3, num_microbatches=4)
    seen = Seen()
    before = [w.numpy() for w in pair[1].trainable_weights]
    for model, callbacks in zip(pair, ([], [seen]), strict=True):
        model.compile(keras.optimizers.SGD(0.5), "mse")
        fit(model, *callbacks)
    assert sorted(k for k, _ in seen.gradients) == [0, 1, 2]
    found = {path: x for _, some in seen.gradients for path, x in some.items()}
    after = {w.path: w.numpy() for w in pair[1].trainable_weights}
    assert found.keys() == after.keys()
    for old, (path, new) in zip(before, after.items(), strict=True):
        compare.close((old - new) / 0.5, found[path], path, 1e-5, 1e-6)


def test_gradients_are_not_scaled():
    model = tfgpipe.PipelinedModel(layers(), num_stages=3, num_microbatches=4)
    seen = Seen()
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=1024.0
    )
    model.compile(optimizer, "mse")
    model.build((16, 4))
    before = [w.numpy() for w in model.trainable_weights]
    fit(model, seen)
    found = {path: x for _, some in seen.gradients for path, x in some.items()}
    for old, weight in zip(before, model.trainable_weights, strict=True):
        moved = (old - weight.numpy()) / 0.5
        compare.close(moved, found[weight.path], weight.path, 1e-5, 1e-6)


def test_later_steps_hold_no_calls():
    model = tfgpipe.PipelinedModel(layers(), num_stages=3, num_microbatches=4)
    model.compile("sgd", "mse")
    seen = Seen()
    fit(model)
    fit(model, seen)
    assert len(seen.calls) == 2 * 2 * 3 * 4
    fit(model)
    assert len(seen.calls) == 2 * 2 * 3 * 4


class Stops(tfgpipe.ActionCallback):
    def __init__(self):
        super().__init__()
        self.number = 0

    def on_action_end(self, action):
        self.number += 1
        raise ValueError(f"enough of {action.kind.name}")


def test_an_error_ends_the_step_and_is_told():
    model = tfgpipe.PipelinedModel(layers(), num_stages=3, num_microbatches=4)
    model.compile("sgd", "mse")
    stops = Stops()
    with pytest.raises(Exception, match="enough of forward"):
        fit(model, stops)
    number = stops.number
    fit(model)
    assert stops.number == number


def test_timed_steps_are_timed_beside_it(tmp_path):
    model = tfgpipe.PipelinedModel(layers(), num_stages=3, num_microbatches=4)
    model.compile("sgd", "mse")
    seen, timing = Seen(), TimelineCallback(tmp_path, steps=(3, 4))
    fit(model, seen, timing, epochs=6)
    assert timing.timeline is not None
    # Steps 2, 3 and 4 are timed instead.
    assert len(seen.calls) == 3 * 2 * 2 * 3 * 4


def test_a_plain_model_is_refused():
    model = plain()
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="Actions are of a PipelinedModel"):
        fit(model, Seen())


def test_a_second_one_is_refused():
    model = tfgpipe.PipelinedModel(layers(), num_stages=3, num_microbatches=4)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="one callback that sees its actions"):
        fit(model, Seen(), Seen())


class Interrupts(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


def test_one_of_an_interrupted_fit_is_in_no_way_of_the_next():
    model = tfgpipe.PipelinedModel(layers(), num_stages=3, num_microbatches=4)
    model.compile("sgd", "mse")
    first, second = Seen(), Seen()
    with pytest.raises(KeyboardInterrupt):
        fit(model, first, Interrupts())
    number = len(first.calls)
    fit(model, second)
    assert len(first.calls) == number == len(second.calls)


class Recuts(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            tfgpipe.recut(self.model, (1, 2))


@pytest.mark.parametrize("timed", [False, True])
def test_stages_that_are_recut_in_training_are_seen_on(timed, tmp_path):
    pair = compare.model_pair(plain, partition=(2, 1), num_microbatches=4)
    seen = TimelineCallback(tmp_path, steps=(2, 4)) if timed else Seen()
    compare.train_alike(pair, X, X, 16, epochs=4, callbacks=[seen, Recuts()])
    if not timed:
        assert len(seen.calls) == 4 * 2 * 2 * 2 * 4
        assert [len(x) for _, x in seen.gradients] == [4, 2] + 3 * [2, 4]
