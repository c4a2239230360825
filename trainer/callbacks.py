"""Keras callbacks that know their step: logging, checkpoints, divergence, profiles.

Logging         loss and rate, on the screen and in `metrics.jsonl`
Finiteness      what to do at a loss or gradient that is not finite
Checkpointing   checkpoints, evaluations, and when the run is over
Evaluators      further evaluations, each at its own steps
Timing          the clock of the run: goodput, heartbeat, watchdog
Profile         TensorFlow's profile of some steps, for TensorBoard
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._util import readable_bytes
from tfgpipe_trainer import devices
from tfgpipe_trainer.checkpoint import variable_names
from tfgpipe_trainer.checkpoint.checkpoints import Checkpoints
from tfgpipe_trainer.checkpoint.run_state import RunState
from tfgpipe_trainer.checkpoint.store import Checkpoint
from tfgpipe_trainer.config import Training
from tfgpipe_trainer.errors import DivergedError
from tfgpipe_trainer.evaluators import Evaluator
from tfgpipe_trainer.experiment import Experiment
from tfgpipe_trainer.goodput import SAVING, Clock
from tfgpipe_trainer.measures import Measures
from tfgpipe_trainer.optimizers import ApplyIfFinite
from tfgpipe_trainer.preemption import Stopping
from tfgpipe_trainer.progress import Measurement, Progress
from tfgpipe_trainer.writers import Metrics

# Steps that the loss of the live line is a mean of, about.
_SMOOTHED = 10


class StepCallback(keras.callbacks.Callback):
    """A Keras callback that knows the step of the run.

    A subclass defines `begin`, `end` or both. Steps count from 1, and on from a
    checkpoint.

    Args:
        first_step: Steps that were done before.

    Attributes:
        step: The step that has begun last.
        metrics: Metrics of the step that has ended last, beside the loss, by name.
    """

    def __init__(self, *, first_step: int) -> None:
        super().__init__()
        self.first_step = self.step = first_step
        self.metrics: dict[str, float] = {}

    def begin(self, step: int) -> None:
        """Runs before a step."""

    def end(self, step: int, loss: float) -> None:
        """Runs after a step, with its loss; `metrics` has the others."""

    def on_train_batch_begin(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Counts the step."""
        self.step = self.first_step + batch + 1
        self.begin(self.step)

    def on_train_batch_end(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Passes the loss on."""
        found = {n: float(x) for n, x in (logs or {}).items() if not np.ndim(x)}
        loss = found.pop("loss")
        self.metrics = found
        self.end(self.first_step + batch + 1, loss)


class Logging(StepCallback):
    """Measures and reports at the end of steps.

    A record of `metrics.jsonl` is made every `training.log_every` steps and at the last
    one. Its loss and metrics are the means over the steps since the record before, but
    for steps whose loss is not finite; a run that goes on has the same. So are those of
    a plain line. The live line of a terminal shows an exponential mean of losses, of
    which a tenth is the last step's; its rate is that since the record before the last.

    Args:
        experiment: The experiment that is trained.
        metrics: Writer of measurements.
        progress: Display of the live line.
        run_state: The state of the run besides its variables.
        measures: Measurements beside loss and metrics.
        first_step: Steps that were done before.
    """

    def __init__(
        self,
        experiment: Experiment,
        metrics: Metrics,
        progress: Progress,
        run_state: RunState,
        measures: Measures,
        *,
        first_step: int,
    ) -> None:
        super().__init__(first_step=first_step)
        self._run_state = run_state
        self._measures = measures
        self._training = experiment.training
        self._units_per_step = experiment.units_per_step
        self._unit = experiment.unit
        self._metrics = metrics
        self._progress = progress
        self._learning_rate = 0.0
        self._shows = False
        self._smooth_loss = math.nan
        # The step and the time of the last two records, since which speed is measured.
        self._marks = deque([(first_step, time.perf_counter())], maxlen=2)

    def begin(self, step: int) -> None:
        """Records the learning rate, if it will be shown or written.

        The schedule counts the updates made, so it is asked before this one.
        """
        if self._is_due(step):
            self._measures.begin()
        is_last = step == self._training.num_steps
        self._shows = is_last or (self._progress.is_due and step != self.first_step + 1)
        if self._is_due(step) or (self._shows and not self._progress.is_live):
            self._learning_rate = float(self.model.optimizer.learning_rate)

    def end(self, step: int, loss: float) -> None:
        """Measures and reports."""
        self._run_state.count({"loss": loss, **self.metrics})
        before = self._smooth_loss
        if not math.isfinite(before):
            self._smooth_loss = loss
        elif math.isfinite(loss):
            self._smooth_loss = before + (loss - before) / _SMOOTHED
        means, is_due = self._run_state.means(), self._is_due(step)
        if is_due or (self._shows and not self._progress.is_live):
            measured = self._measured(step, means, self._marks[-1])
        if is_due:
            self._record(measured, means)
        if self._shows and self._progress.is_live:
            smooth = {**means, "loss": self._smooth_loss}
            measured = self._measured(step, smooth, self._marks[0])
        if self._shows:
            self._progress.show(measured)
        if step == self.first_step + 1:
            # Most of its time goes into tracing, so it says nothing.
            self._marks = deque([(step, time.perf_counter())], maxlen=2)

    def _is_due(self, step: int) -> bool:
        return step % self._training.log_every == 0 or step == self._training.num_steps

    def _record(self, measurement: Measurement, means: Mapping[str, float]) -> None:
        self._run_state.start_record()
        self._marks.append((measurement.step, time.perf_counter()))
        self._metrics.write(
            measurement.step,
            {
                **means,
                "learning_rate": measurement.learning_rate,
                "throughput": measurement.throughput,
                **self._measures.end(self._units_per_step / measurement.throughput),
            },
        )

    def _measured(
        self, step: int, means: Mapping[str, float], since: tuple[int, float]
    ) -> Measurement:
        marked_step, marked_time = since
        seconds_per_step = (time.perf_counter() - marked_time) / (step - marked_step)
        return Measurement(
            step=step,
            num_steps=self._training.num_steps,
            loss=means["loss"],
            metrics={name: mean for name, mean in means.items() if name != "loss"},
            learning_rate=self._learning_rate,
            throughput=self._units_per_step / seconds_per_step,
            seconds_left=(self._training.num_steps - step) * seconds_per_step,
            unit=self._unit,
            memory=_memory(),
        )


def _memory() -> str:
    name, size = devices.memory_in_use()
    return "" if math.isnan(size) else f"{name} {readable_bytes(int(size))}"


class Finiteness(StepCallback):
    """Ends a run at a step that is not finite, or has it left out.

    The optimizer itself leaves weights and slots as they were (`apply_if_finite`). Of
    what layers learn in the forward pass, as moving averages, copies are kept from
    before the step where steps are to be left out.

    Args:
        training: The policy for steps that are not finite, and its limit.
        run_state: The state of the run besides its variables.
        first_step: Steps that were done before.
        batch: Returns the batch of a step again, which may be what is not finite.
    """

    def __init__(
        self,
        training: Training,
        run_state: RunState,
        *,
        first_step: int,
        batch: Callable[[int], Any] | None = None,
    ) -> None:
        super().__init__(first_step=first_step)
        self._batch = batch
        self._training = training
        self._run_state = run_state
        self._num_skipped = 0
        self._learnt: variable_names.State = {}
        self._before: dict[str, Any] = {}

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Counts the steps left out before, and finds state that a step may spoil."""
        self._num_skipped = self._count()
        if self._training.on_nonfinite == "skip":
            self._learnt = {
                str(i): v
                for i, v in enumerate(self.model.non_trainable_variables)
                if keras.backend.is_float_dtype(v.dtype)
            }

    def begin(self, step: int) -> None:
        """Resets the running loss to this step's, and copies state it may spoil."""
        self.model.reset_metrics()
        self._before = variable_names.snapshot(self._learnt)

    def end(self, step: int, loss: float) -> None:
        """Stops, or leaves the step out, if it was not finite.

        Raises:
            DivergedError: If it is to stop.
        """
        count, scale = self._count(), self._scale()
        if scale is not None and scale < 1:
            self._check_batch(step)
            raise DivergedError(
                f"gradients are not finite up to step {step}, however small the loss "
                f"is scaled: now by {scale:.0e}. Try a smaller "
                "optimizer.learning_rate, or precision.policy=float32 to see whose"
            )
        if math.isfinite(loss) and count == self._num_skipped:
            return
        what = f"the loss is {loss} at step {step}"
        if count == self._num_skipped and scale is None:
            # The gradients are finite, so the weights have moved: nothing to leave out.
            self._check_batch(step)
            raise DivergedError(f"{what}. Try a smaller optimizer.learning_rate")
        if count != self._num_skipped:
            what += f", and the gradient of {self._culprits()}"
        self._num_skipped = count
        skipped = self._run_state.skipped
        if self._training.on_nonfinite == "stop":
            self._check_batch(step)
            raise DivergedError(
                f"{what}. Try a smaller optimizer.learning_rate, or leave such steps "
                "out with --set=training.on_nonfinite=skip"
            )
        if len(skipped) >= self._training.max_nonfinite_steps:
            self._check_batch(step)
            raise DivergedError(
                f"{what}. Steps {', '.join(map(str, skipped))} were left out before "
                "it, as many as training.max_nonfinite_steps allows. Try a smaller "
                "optimizer.learning_rate"
            )
        for name, value in self._before.items():
            self._learnt[name].assign(value)
        skipped.append(step)
        print(f"\nSkipped step {step}: {what}.", flush=True)

    def _check_batch(self, step: int) -> None:
        """Raises DivergedError if the batch of a step is not finite itself."""
        found = "" if self._batch is None else not_finite(self._batch(step))
        if found:
            raise DivergedError(
                f"the data of step {step} hold {found}. Mend the data, or leave such "
                "steps out with --set=training.on_nonfinite=skip"
            )

    def _apply_if_finite(self) -> ApplyIfFinite | None:
        optimizer = self.model.optimizer
        return optimizer if isinstance(optimizer, ApplyIfFinite) else None

    def _count(self) -> int:
        optimizer = self._apply_if_finite()
        return (
            int(keras.ops.convert_to_numpy(optimizer.num_skipped)) if optimizer else 0
        )

    def _scale(self) -> float | None:
        """Returns the scale of the loss; an overflow leaves its step out, too."""
        optimizer = self.model.optimizer
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return None
        return float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))

    def _culprits(self) -> str:
        """Names weights whose gradient was not finite, in the order of the backward."""
        optimizer = self._apply_if_finite()
        assert optimizer is not None  # It has counted.
        finite = np.asarray(keras.ops.convert_to_numpy(optimizer.was_finite))
        names = {id(v): name for name, v in variable_names.weights(self.model).items()}
        named = [names[id(v)] for v in self.model.trainable_variables]
        spoilt = [n for n, fine in zip(named, finite, strict=True) if not fine]
        others = f", then {len(spoilt) - 1} more" if len(spoilt) > 1 else ""
        return f"{spoilt[-1]} was the first that is not finite{others}"


def not_finite(batch: Any) -> str:
    """Names the values of a batch that are not finite; empty if all are.

    >>> x = tf.constant([[1.0, 2.0], [3.0, float("nan")]])
    >>> not_finite(({"width": x}, tf.constant([0, 1])))
    "nan in inputs['width'], first in row 1 at feature 1, in 1 of 2 rows"
    """
    parts = batch if isinstance(batch, tuple) else (batch,)
    for name, part in zip(("inputs", "targets", "weights"), parts, strict=False):
        for path, leaf in keras.tree.flatten_with_path(part):
            if not (tf.is_tensor(leaf) and leaf.dtype.is_floating):
                continue
            wrong = np.argwhere(~tf.math.is_finite(leaf).numpy())
            if not len(wrong):
                continue
            row, *feature = wrong[0].tolist()
            value = float(leaf[tuple(wrong[0].tolist())])
            where = f" at feature {', '.join(map(str, feature))}" if feature else ""
            return (
                f"{value} in {name}{''.join(f'[{key!r}]' for key in path)}, first in "
                f"row {row}{where}, in {len(np.unique(wrong[:, 0]))} of {len(leaf)} "
                "rows"
            )
    return ""


Evaluate = Callable[[int], Mapping[str, float]]


class Checkpointing(StepCallback):
    """Evaluates and saves when it is due, and ends a run that is to end.

    Args:
        experiment: The experiment that is trained.
        checkpoints: The checkpoints of the run.
        run_state: The state of the run besides its variables.
        stopping: Requests to end the run.
        evaluate: Measures the model after a step, or None to train alone.
        clock: Clock of the run, to book the time of copies.
        first_step: Steps that were done before.
        outputs: The names of the model's outputs, if there are several.
    """

    def __init__(
        self,
        experiment: Experiment,
        checkpoints: Checkpoints,
        run_state: RunState,
        stopping: Stopping,
        evaluate: Evaluate | None,
        clock: Clock,
        *,
        first_step: int,
        outputs: Sequence[str] = (),
    ) -> None:
        super().__init__(first_step=first_step)
        self._num_steps = experiment.training.num_steps
        self._saving = experiment.checkpoint
        self._evaluation = experiment.evaluation
        if evaluate and self._evaluation.every_steps:
            self._mode = self._evaluation.direction(experiment.metrics(), outputs)
        self._checkpoints = checkpoints
        self._run_state = run_state
        self._stopping = stopping
        self._evaluate = evaluate
        self._clock = clock
        self._saved_at = time.monotonic()
        self._copy: Checkpoint | None = None

    def begin(self, step: int) -> None:
        """Defers signals to the end of the step."""
        self._stopping.stepping = True
        if step == self.first_step + 1:
            print("Tracing the first step.", flush=True)

    def end(self, step: int, loss: float) -> None:
        """Evaluates, saves, stops.

        A checkpoint is written once the step after it is known to be finite: what a
        run goes on from is not what makes it diverge.
        """
        self._hand_over()
        every = self._evaluation.every_steps
        if self._evaluate and every and step % every == 0:
            self._compare(step, self._evaluate(step))
        # One host is asked to stop, or finds that time is over; all act on it.
        asked, is_late = self._checkpoints.coordinator.any(
            self._stopping.asked, self._is_late
        )
        self._stopping.all_hosts_stop |= asked
        ends = self._is_over or asked or step == self._num_steps
        is_due = is_late or step % self._saving.every_steps == 0
        if ends or is_due or self._run_state.best_step == step:
            with self._clock.use(SAVING):
                self._copy = self._checkpoints.copy(step, self._run_state.written())
            self._saved_at = time.monotonic()
        if ends:
            self._hand_over()
            self.model.stop_training = True

    @property
    def _is_over(self) -> bool:
        return self._run_state.is_over(self._evaluation.patience)

    def _hand_over(self) -> None:
        """Writes the last copy."""
        if self._copy is not None:
            with self._clock.use(SAVING):
                self._checkpoints.save(self._copy)
            self._copy = None

    @property
    def _is_late(self) -> bool:
        minutes = self._saving.every_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def _compare(self, step: int, measured: Mapping[str, float]) -> None:
        """Notes whether an evaluation is the best so far."""
        metric, run_state = self._evaluation.metric, self._run_state
        value = measured[metric]
        sign = 1 if self._mode == "min" else -1
        if run_state.best_value is None or sign * value < sign * run_state.best_value:
            run_state.best_step, run_state.best_value, run_state.num_worse = (
                step,
                value,
                0,
            )
            return
        run_state.num_worse += 1
        if self._is_over:
            print(
                f"\nStopping early: of the last {run_state.num_worse} evaluations "
                f"none was better than {metric} {run_state.best_value:.4f} at step "
                f"{run_state.best_step}.",
                flush=True,
            )


class Evaluators(StepCallback):
    """Makes evaluations that are due.

    Args:
        evaluate: Makes the evaluations of some names after a step.
        evaluators: The evaluations, by name.
        first_step: Steps that were done before.
    """

    def __init__(
        self,
        evaluate: Callable[[Sequence[str], int], None],
        evaluators: Mapping[str, Evaluator],
        *,
        first_step: int,
    ) -> None:
        super().__init__(first_step=first_step)
        self._evaluate = evaluate
        self._evaluators = evaluators

    def end(self, step: int, loss: float) -> None:
        """Makes those of a step."""
        due = [name for name, each in self._evaluators.items() if each.is_due(step)]
        if due:
            self._evaluate(due, step)


class Timing(StepCallback):
    """Tells the clock of steps.

    Args:
        clock: Clock of the run.
        first_step: Steps that were done before.
    """

    def __init__(self, clock: Clock, *, first_step: int) -> None:
        super().__init__(first_step=first_step)
        self._clock = clock

    def begin(self, step: int) -> None:
        """Begins a step."""
        self._clock.begin(step)

    def end(self, step: int, loss: float) -> None:
        """Ends a step, as the last of the callbacks."""
        self._clock.end(step)


class Profile(StepCallback):
    """Profiles steps.

    Args:
        folder: The run's.
        steps: The first and the last step, counted from 1.
        first_step: Steps that were done before.
    """

    def __init__(
        self, folder: Path, steps: tuple[int, int], *, first_step: int
    ) -> None:
        super().__init__(first_step=first_step)
        self._folder = folder / "curves" / "profile"
        self._first, self._last = steps
        self._on = self._written = False

    def begin(self, step: int) -> None:
        """Begins before the first step."""
        if step == self._first:
            tf.profiler.experimental.start(str(self._folder))
            self._on = True

    def end(self, step: int, loss: float) -> None:
        """Ends after the last step."""
        if step == self._last:
            self._end()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Ends with a run that ends before."""
        self._end()

    def summary(self) -> str:
        """Returns a line with the place of the profile."""
        if not self._written:
            return f"No profile: the run has not come to step {self._first}."
        return f"The profile is in {self._folder}: `tensorboard --logdir` shows it."

    def _end(self) -> None:
        if self._on:
            tf.profiler.experimental.stop()
            self._on, self._written = False, True
