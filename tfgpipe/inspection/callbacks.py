"""Keras callbacks that see what each device does during training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe.pipelined_model import PipelinedModel
from tfgpipe.report import plot_timelines
from tfgpipe.runtime import HostCalls, Recorder, TimingRecorder
from tfgpipe.schedules import Action
from tfgpipe.simulation import (
    Timeline,
    average_timelines,
    costs_of,
    simulate,
    timeline_metrics,
    trace_events,
)
from tfgpipe.stage import Stage


class TimelineCallback(keras.callbacks.Callback):
    """Times every action of some training steps, and draws them beside theory.

    Writes into `folder`:

    * `timeline.json`: the step, to open at https://ui.perfetto.dev;
    * `pipeline.png`: a Gantt chart, theory above measurement, with their metrics;
    * `report.json`: these metrics.

    The step shown is the mean of those timed; a step of fewer microbatches than the
    others is left out. Theory is `tfgpipe.simulate` with the mean measured time of each
    stage's forward and backward, and transfers that take no time: what the schedule
    allows with these stage functions.

    Actions are timed by operations that read the host's clock before and after each
    (see `tfgpipe.runtime.timer`): some microseconds an action, in a train step traced
    for the purpose. All others run as they do without this callback.

    Args:
        folder: The folder to write to, which is created if need be.
        steps: The first and the last step to time, counted from 1. One more before
            them is timed and left out, since it allocates memory that later ones use.
        first_step: Number of steps before the first of `fit`. Defaults to the updates
            that the optimizer has counted by then, which are fewer if it accumulates
            gradients.

    Example:

    >>> import tempfile
    >>> layers = [keras.layers.Dense(16) for _ in range(4)]
    >>> model = tfgpipe.PipelinedModel(layers, num_stages=2, num_microbatches=4)
    >>> model.compile("sgd", "mse")
    >>> callback = tfgpipe.TimelineCallback(tempfile.mkdtemp(), steps=(2, 3))
    >>> x = np.ones((32, 16), "float32")
    >>> _ = model.fit(x, x, batch_size=8, callbacks=[callback], verbose=0)
    >>> callback.timeline.schedule.name
    'gpipe'

    Attributes:
        timeline: The measured timeline, after the last of the steps.
        theory: The simulated timeline of the schedule with the measured times.

    Raises:
        ValueError: If the steps are not two numbers from 1 on, in order.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        steps: tuple[int, int] = (10, 12),
        first_step: int | None = None,
    ) -> None:
        super().__init__()
        first, last = steps
        if not 1 <= first <= last:
            raise ValueError(
                "`steps` are the first and the last step to time, counted from 1. "
                f"Received {steps}."
            )
        self._folder = Path(folder)
        self._first, self._last = first, last
        self._first_step = first_step
        self._step = 0
        self._recorder = TimingRecorder()
        self._measured: list[Timeline] = []
        self._timed: Callable[..., Any] | None = None
        self._stages: tuple[Stage, ...] = ()  # That it is of.
        self._was_timed = False
        self.timeline: Timeline | None = None
        self.theory: Timeline | None = None

    def set_model(self, model: keras.Model) -> None:
        """Sets the model to train; raises TypeError if it is no `PipelinedModel`."""
        _check_model(model, "A timeline is")
        super().set_model(model)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Counts the steps from here on."""
        updates = tf.convert_to_tensor(self.model.optimizer.iterations)
        self._step = int(updates) if self._first_step is None else self._first_step

    def on_train_batch_begin(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Times the step, if it is one of those to time."""
        self._step += 1
        if self._first - 1 <= self._step <= self._last:
            self._time_next_step()

    def on_train_batch_end(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Records the times of the step; writes, if it was the last."""
        if not self._was_timed:
            return
        self._was_timed = False
        if self._step >= self._first:
            self._measured.append(self._recorder.timeline(self.model.schedule))
        if self._step == self._last:
            self._write()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Writes what there is, if training ended before the last step to time."""
        if self._measured and self.timeline is None:
            self._write()

    def summary(self) -> str:
        """Returns theory and measurement as text, and where their pictures are."""
        if self.timeline is None:
            return (
                f"No step from {self._first} to {self._last} was trained, so none was "
                "timed."
            )
        return f"{self.theory}\n\n{self.timeline}\n\nDrawn in {self._folder}."

    def _time_next_step(self) -> None:
        """Times the next step, and restores the model's train function after it.

        Also restores it after an error, which Keras does not report to callbacks.
        """
        model, untimed = self.model, self.model.train_function
        if self._timed is None or _were_recut(model, self._stages):
            model.make_train_function(force=True)
            self._timed = model.train_function
        timed = self._timed

        def step(iterator: Any) -> Any:
            try:
                with _recorded(model, self._recorder):
                    results = timed(iterator)
                self._was_timed, self._stages = True, model.stages
                return results
            finally:
                model.train_function = untimed

        model.train_function = step

    def _write(self) -> None:
        name = f"{self.model.schedule.name}, K={self.model.schedule.num_stages}"
        largest = max(each.schedule.num_microbatches for each in self._measured)
        alike = [x for x in self._measured if x.schedule.num_microbatches == largest]
        steps = f"{len(alike)} steps of {self.model.name}"
        measured = dataclasses.replace(
            average_timelines(alike), title=f"{name}: measured, {steps}"
        )
        theory = simulate(measured.schedule, costs_of(measured)).timeline
        theory = dataclasses.replace(theory, title=f"{name}: theory, times as measured")
        self.timeline, self.theory = measured, theory
        self._folder.mkdir(parents=True, exist_ok=True)
        both = {"measured": measured, "theory": theory}
        report = {which: timeline_metrics(each) for which, each in both.items()}
        files = {"timeline.json": trace_events(measured), "report.json": report}
        for file, content in files.items():
            text = json.dumps(content, indent=1) + "\n"
            (self._folder / file).write_text(text, encoding="utf-8")
        plot_timelines([theory, measured], path=self._folder / "pipeline.png")


class ActionCallback(keras.callbacks.Callback):
    """Base class of callbacks that see each action of each train step.

    Methods are called on the host, from TensorFlow's threads, several at a time if
    devices are. An action begins when `on_action_begin` has returned, and its device
    goes on when `on_action_end` has; other devices go on when they have its results.
    Each call takes a tenth of a millisecond or more, and on a GPU waits for a transfer.
    Without such a callback steps hold no calls. Of several replicas, each process sees
    the actions of its own. Steps that a `TimelineCallback` times hold no calls either,
    which they would time.

    Subclasses override what they need:

    * `on_action_begin(action)` and `on_action_end(action)`, with a `tfgpipe.Action`;
    * `on_stage_gradients(k, gradients)`, once a step with the gradients of stage k as
      the optimizer is given them, but not scaled: arrays by the paths of the weights.

    A metric of a stage is one of its layers, as everywhere in Keras.

    Example:

    >>> class Norms(tfgpipe.ActionCallback):
    ...     def on_stage_gradients(self, k, gradients):
    ...         squares = sum(float((x**2).sum()) for x in gradients.values())
    ...         print(f"stage {k}: norm {squares**0.5:.1f}")
    >>> layers = [keras.layers.Dense(4, kernel_initializer="zeros") for _ in range(2)]
    >>> model = tfgpipe.PipelinedModel(layers, num_stages=1, num_microbatches=2)
    >>> model.compile("sgd", "mse")
    >>> x = np.ones((4, 4), "float32")
    >>> _ = model.fit(x, x, callbacks=[Norms()], verbose=0)
    stage 0: norm 1.0

    Raises:
        TypeError: If the model is no `PipelinedModel`.
    """

    def set_model(self, model: keras.Model) -> None:
        """Sets the model to train; raises TypeError if it is no `PipelinedModel`."""
        _check_model(model, "Actions are")
        super().set_model(model)

    def on_action_begin(self, action: Action) -> None:
        """Called before an action, when all that it reads is there."""

    def on_action_end(self, action: Action) -> None:
        """Called after an action, when all its results are there."""

    def on_stage_gradients(self, k: int, gradients: dict[str, np.ndarray]) -> None:
        """Called once a step with the gradients of stage k."""

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Has steps traced that call the methods.

        Raises:
            ValueError: If another callback of this kind is there.
        """
        model = self.model
        other = getattr(model.train_function, "action_callback", None)
        # Of a `fit` that was interrupted one may be left.
        if other is not None and other.params is self.params:
            raise ValueError(
                "A model has one callback that sees its actions. Received a second "
                "`ActionCallback`. Make one of both."
            )
        self._call_in_steps()

    def on_train_batch_begin(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Has steps traced again after `tfgpipe.recut`."""
        if _were_recut(self.model, self._stages):
            self._call_in_steps()

    def _call_in_steps(self) -> None:
        """Gives the model a train function that calls the methods."""
        model = self.model
        untraced = type(self).on_stage_gradients is ActionCallback.on_stage_gradients
        recorder = HostCalls(
            self.on_action_begin,
            self.on_action_end,
            None if untraced else self.on_stage_gradients,
        )
        model.make_train_function(force=True)
        self._stages: tuple[Stage, ...] = ()
        traced = model.train_function

        def step(iterator: Any) -> Any:
            try:
                with _recorded(model, recorder):
                    results = traced(iterator)
                self._stages = model.stages
                return results
            except BaseException:
                model.train_function = None
                raise

        vars(step)["action_callback"] = self
        model.train_function = step

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Has later steps traced without calls."""
        self.model.train_function = None


@contextlib.contextmanager
def _recorded(model: PipelinedModel, recorder: Recorder) -> Iterator[None]:
    """Train steps that are traced inside have a recorder."""
    before, model.recorder = model.recorder, recorder
    try:
        yield
    finally:
        model.recorder = before


def _were_recut(model: PipelinedModel, stages: tuple[Stage, ...]) -> bool:
    """Returns whether a model no longer has the stages that it had in a step."""
    return bool(stages) and model.stages is not stages


def _check_model(model: keras.Model, what: str) -> None:
    """Raises TypeError if a model is no `PipelinedModel`."""
    if not isinstance(model, PipelinedModel):
        raise TypeError(
            f"{what} of a PipelinedModel, which runs all of a step in the order of a "
            f"schedule. Received '{model.name}' of type {type(model).__name__}. Make "
            "one of it with `tfgpipe.pipeline`."
        )
