"""A run: from its last checkpoint, if there is one, to its last step."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

import tfgpipe
from params.experiment import Experiment
from trainer.checkpoints import Checkpoints
from trainer.evaluate import comparison, evaluate
from trainer.metrics import Metrics
from trainer.progress import Measurement, Progress


def train(
    experiment: Experiment,
    model: tfgpipe.PipelinedModel,
    folder: Path,
    *,
    trace_steps: tuple[int, int] | None = None,
) -> None:
    """Trains, evaluates, and draws a sample.

    Args:
        experiment: What to train.
        model: Its model.
        folder: The run's.
        trace_steps: The first and the last step to time, if any.
    """
    checkpoints = Checkpoints(folder / "checkpoints", model)
    first_step = checkpoints.restore() or 0
    training = experiment.build_dataset("train", first_step=first_step)
    # Now, since what is wrong with it should not come up after the training.
    validation = experiment.build_dataset("validation")
    metrics = Metrics(folder, step=first_step)
    if first_step:
        print(f"Going on from step {first_step}.", flush=True)
    if first_step < experiment.training.num_steps:
        print("Tracing the first step.", flush=True)
        watch = _Watch(experiment, first_step, checkpoints, metrics)
        timing = []
        if trace_steps is not None:
            timing = [tfgpipe.TimelineCallback(folder, steps=trace_steps)]
        model.fit(
            training,
            callbacks=[watch, *timing],
            shuffle=False,
            verbose=0,
        )
        for each in timing:
            print(each.summary(), flush=True)

    losses = evaluate(experiment, model, validation)
    metrics.write(
        experiment.training.num_steps,
        {f"validation_{name}": loss for name, loss in losses.items()},
    )
    print(comparison(losses, unit=experiment.unit), flush=True)
    sample = experiment.sample(model)
    if sample:
        (folder / "sample.txt").write_text(sample, encoding="utf-8")
        print(f"\nA sample:\n\n{sample}")


class _Watch(keras.callbacks.Callback):
    """Measures, reports and saves at the end of steps."""

    def __init__(
        self,
        experiment: Experiment,
        first_step: int,
        checkpoints: Checkpoints,
        metrics: Metrics,
    ) -> None:
        super().__init__()
        self._training = experiment.training
        self._tokens_per_step = experiment.tokens_per_step
        self._first_step = first_step
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._progress = Progress(sys.stdout)
        self._learning_rate = 0.0
        # The step and the time since which speed is measured.
        self._mark = (first_step, time.perf_counter())

    def on_train_batch_begin(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Makes the loss that Keras reports this step's, not a mean of several."""
        self.model.reset_metrics()
        if self._is_due(batch) or self._progress.is_live:
            # The schedule counts the updates made, so it is asked before this one.
            self._learning_rate = float(self.model.optimizer.learning_rate)

    def on_train_batch_end(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Measures, reports, saves."""
        step = self._first_step + batch + 1
        loss = (logs or {})["loss"]
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {step}")
        if self._is_due(batch) or self._progress.is_live:
            self._report(step, loss, due=self._is_due(batch))
        if batch == 0:  # Most of its time goes into tracing, so it says nothing.
            self._mark = (step, time.perf_counter())
        if step % self._training.save_every == 0 or self._is_last(step):
            self._checkpoints.save(step)

    def _is_due(self, batch: int) -> bool:
        step = self._first_step + batch + 1
        return step % self._training.log_every == 0 or self._is_last(step)

    def _is_last(self, step: int) -> bool:
        return step == self._training.num_steps

    def _report(self, step: int, loss: float, *, due: bool) -> None:
        marked_step, marked_time = self._mark
        now = time.perf_counter()
        seconds_per_step = (now - marked_time) / (step - marked_step)
        measurement = Measurement(
            step=step,
            num_steps=self._training.num_steps,
            loss=loss,
            learning_rate=self._learning_rate,
            tokens_per_second=self._tokens_per_step / seconds_per_step,
            seconds_left=(self._training.num_steps - step) * seconds_per_step,
        )
        self._progress.show(measurement)
        if due:
            self._mark = (step, now)
            self._metrics.write(
                step,
                {
                    "loss": loss,
                    "learning_rate": measurement.learning_rate,
                    "tokens_per_second": measurement.tokens_per_second,
                },
            )
