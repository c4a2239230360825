"""Between steps: evaluations, checkpoints, and the end of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from params.experiment import Experiment
from trainer.checkpoints import Checkpoints, Copy
from trainer.notes import Notes
from trainer.steps import StepCallback
from trainer.stopping import Stopping

Evaluate = Callable[[int], Mapping[str, float]]


class Keeping(StepCallback):
    """Evaluates and saves when it is due, and ends a run that is to end.

    Args:
        experiment: What is trained.
        checkpoints: Where it is saved.
        notes: What the run remembers.
        stopping: Whether somebody has asked for the end.
        evaluate: Measures the model after a step, or None to train alone.
        first_step: Steps that were done before.
    """

    def __init__(
        self,
        experiment: Experiment,
        checkpoints: Checkpoints,
        notes: Notes,
        stopping: Stopping,
        evaluate: Evaluate | None,
        *,
        first_step: int,
    ) -> None:
        super().__init__(first_step=first_step)
        self._num_steps = experiment.training.num_steps
        self._saving = experiment.saving
        self._evaluation = experiment.evaluation
        if evaluate and self._evaluation.steps:
            self._better = self._evaluation.direction(experiment.metrics())
        self._checkpoints = checkpoints
        self._notes = notes
        self._stopping = stopping
        self._evaluate = evaluate
        self._saved_at = time.monotonic()
        self._copy: Copy | None = None

    def begin(self, step: int) -> None:
        """Has signals wait for the end of the step."""
        self._stopping.stepping = True

    def end(self, step: int, loss: float) -> None:
        """Evaluates, saves, stops.

        A checkpoint is written once the step after it is known to be finite: what a
        run goes on from is not what makes it diverge.
        """
        self._hand_over()
        every = self._evaluation.steps
        if self._evaluate and every and step % every == 0:
            self._compare(step, self._evaluate(step))
        # One host is asked to stop, or finds that time is over; all act on it.
        asked, is_late = self._checkpoints.team.any(self._stopping.asked, self._is_late)
        self._stopping.agreed |= asked
        ends = self._is_over or asked or step == self._num_steps
        is_due = is_late or step % self._saving.checkpoint_steps == 0
        if ends or is_due or self._notes.best_step == step:
            self._copy = self._checkpoints.copy(step, self._notes.written())
            self._saved_at = time.monotonic()
        if ends:
            self._hand_over()
            self.model.stop_training = True

    @property
    def _is_over(self) -> bool:
        return self._notes.is_over(self._evaluation.patience)

    def _hand_over(self) -> None:
        """Has the last copy written."""
        if self._copy is not None:
            self._checkpoints.save(self._copy)
            self._copy = None

    @property
    def _is_late(self) -> bool:
        minutes = self._saving.checkpoint_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def _compare(self, step: int, measured: Mapping[str, float]) -> None:
        """Notes whether an evaluation is the best so far."""
        metric, notes = self._evaluation.metric, self._notes
        value = measured[metric]
        sign = 1 if self._better == "lower" else -1
        if notes.best_value is None or sign * value < sign * notes.best_value:
            notes.best_step, notes.best_value, notes.num_worse = step, value, 0
            return
        notes.num_worse += 1
        if self._is_over:
            print(
                f"\nStopping early: of the last {notes.num_worse} evaluations "
                f"none was better than {metric} {notes.best_value:.4f} at step "
                f"{notes.best_step}.",
                flush=True,
            )
