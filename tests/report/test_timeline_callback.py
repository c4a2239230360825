"""Timing steps under `fit`: which, and what is written of them."""

from __future__ import annotations

import json

import keras
import matplotlib.image
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tfgpipe import TimelineCallback

X = np.ones((24, 4), "float32")


def model(**arguments: object) -> tfgpipe.PipelinedModel:
    made = tfgpipe.PipelinedModel(
        [
            keras.layers.Dense(4, kernel_initializer=keras.initializers.Constant(0.1))
            for _ in range(4)
        ],
        num_stages=2,
        num_microbatches=2,
        **arguments,
    )
    made.compile(keras.optimizers.SGD(1e-3), "mse")
    return made


def fit(trained: keras.Model, *callbacks: keras.callbacks.Callback, epochs: int = 2):
    return trained.fit(
        X, X, batch_size=8, epochs=epochs, callbacks=list(callbacks), verbose=0
    )


def test_a_timed_run_writes_a_trace_a_picture_and_a_report(tmp_path):
    timing = TimelineCallback(tmp_path / "new" / "folder", steps=(3, 5))
    fit(model(schedule="1f1b"), timing)
    folder = tmp_path / "new" / "folder"
    trace = json.loads((folder / "timeline.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 2 * 2 * 2 + 4  # And what is recomputed.
    report = json.loads((folder / "report.json").read_text())
    for part in ("measured", "theory"):
        assert report[part]["schedule"] == "1f1b"
        assert 0 < report[part]["bubble"] < 1
        assert len(report[part]["utilisation"]) == 2
    assert report["theory"]["step_time_seconds"] == timing.theory.step_time
    height, width, _ = matplotlib.image.imread(folder / "pipeline.png").shape
    assert min(height, width) > 300
    summary = timing.summary()
    assert "1f1b, K=2: measured, 3 steps" in summary
    assert "1f1b, K=2: theory" in summary
    assert str(folder) in summary


def test_timing_changes_no_result(tmp_path):
    plain, timed = model(), model()
    history = fit(plain).history
    assert fit(timed, TimelineCallback(tmp_path, steps=(2, 4))).history == history
    for a, b in zip(plain.get_weights(), timed.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_only_the_steps_to_time_are_timed(tmp_path):
    timed = []

    class Spy(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.untimed = self.model.train_function

        def on_train_batch_begin(self, batch, logs=None):
            if self.model.train_function is not self.untimed:
                timed.append(int(self.model.optimizer.iterations) + 1)

    fit(model(), TimelineCallback(tmp_path, steps=(4, 5)), Spy())
    assert timed == [3, 4, 5]  # The one before is left out of the mean.


def test_steps_of_fewer_microbatches_are_left_out_of_the_mean(tmp_path):
    trained = model()
    timing = TimelineCallback(tmp_path, steps=(2, 6))
    for rows, expected in ((1, 1), (8, 2)):  # Known when it is traced.
        x = tf.ones((rows, 4))
        data = tf.data.Dataset.from_tensors((x, x)).repeat(3)
        trained.fit(data, callbacks=[timing], verbose=0)
        assert timing.timeline.schedule.num_microbatches == expected
    assert "3 steps of" in timing.timeline.title


@pytest.mark.parametrize("where", ["step", "callback"])
def test_an_error_in_a_timed_step_leaves_the_model_untimed(tmp_path, where):
    numerics = keras.layers.Lambda(lambda x: tf.debugging.check_numerics(x, "spoilt"))
    trained = tfgpipe.PipelinedModel(
        [keras.layers.Dense(4), numerics, keras.layers.Dense(4)],
        num_stages=2,
        num_microbatches=2,
    )
    trained.compile("sgd", "mse")
    fit(trained, epochs=1)
    plain = trained.train_function

    class Fails(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if where == "callback" and batch == 1:
                raise RuntimeError("spoilt")

    x = X.copy()
    x[8:16] = np.nan if where == "step" else 1.0
    timing = TimelineCallback(tmp_path, steps=(4, 6))
    # TensorFlow reports now and then its cancellation of the other stage.
    with pytest.raises(Exception, match=r"spoilt|is cancelled"):
        trained.fit(
            x, x, batch_size=8, callbacks=[timing, Fails()], shuffle=False, verbose=0
        )
    trained.fit(X, X, batch_size=8, verbose=0, steps_per_epoch=1)
    assert trained.train_function is plain
    assert trained.recorder is None


def test_a_run_that_ends_early_writes_what_it_has(tmp_path):
    timing = TimelineCallback(tmp_path, steps=(2, 100))
    fit(model(), timing, epochs=1)
    assert "2 steps of" in timing.timeline.title
    assert (tmp_path / "pipeline.png").exists()


def test_a_run_that_ends_before_writes_nothing_and_says_so(tmp_path):
    timing = TimelineCallback(tmp_path, steps=(10, 12))
    fit(model(), timing, epochs=1)
    assert timing.timeline is None
    assert not list(tmp_path.iterdir())
    assert timing.summary() == ("No step from 10 to 12 was trained, so none was timed.")


def test_steps_are_counted_not_updates(tmp_path):
    trained = model()
    trained.compile(keras.optimizers.SGD(1e-3, gradient_accumulation_steps=4), "mse")
    timing = TimelineCallback(tmp_path, steps=(3, 4))
    fit(trained, timing)
    assert "2 steps of" in timing.timeline.title
    # A run that goes on after others, some of which the optimizer has left out.
    timing = TimelineCallback(tmp_path, steps=(102, 103), first_step=100)
    fit(trained, timing)
    assert "2 steps of" in timing.timeline.title


@pytest.mark.parametrize("steps", [(0, 3), (5, 4)])
def test_steps_out_of_order_are_refused(steps, tmp_path):
    with pytest.raises(ValueError, match="first and the last step to time, counted"):
        TimelineCallback(tmp_path, steps=steps)


def test_a_model_that_does_not_own_its_loss_is_refused(tmp_path):
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    plain.compile("sgd", "mse")
    with pytest.raises(TypeError, match=r"Make one of it with `tfgpipe\.pipeline`"):
        fit(plain, TimelineCallback(tmp_path))


def test_replicas_are_timed_as_the_first_of_them(tmp_path):
    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2)
    with strategy.scope():
        trained = model()
    timing = TimelineCallback(tmp_path, steps=(2, 3))
    fit(trained, timing)
    assert timing.timeline.schedule.num_devices == 2
    assert len([s for s in timing.timeline.spans if s.kind.name == "forward"]) == 4
