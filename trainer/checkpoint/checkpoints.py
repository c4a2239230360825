"""The checkpoints of a run: what is restored, and saved while training goes on.

Values are copied by `copy`, and written by a thread. At most one copy waits behind the
one that is being written; a third waits for the disk, so memory is bounded. A
checkpoint that cannot be written costs itself alone, and is reported at once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfgpipe_trainer.checkpoint import store, variable_names
from tfgpipe_trainer.checkpoint.store import Checkpoint, DamagedError, Metadata
from tfgpipe_trainer.config import Saving
from tfgpipe_trainer.errors import CheckpointError
from tfgpipe_trainer.hosts import Coordinator
from tfgpipe_trainer.hyperparams import HyperparameterError
from tfgpipe_trainer.progress import report


def latest_valid(folder: Path, *, set_aside: bool = False) -> Checkpoint | None:
    """Reads the last checkpoint that is as it was written, telling what is not.

    Args:
        folder: The folder of checkpoints.
        set_aside: True to move damaged ones out of the way of a whole one.

    Raises:
        CheckpointError: If there are checkpoints and all are damaged, or a later
            version has written one.
    """
    damaged = []
    for path in store.misnamed(folder):
        report(f"{path} is passed over: it has not the name of a checkpoint.")
    for step in reversed(store.steps(folder)):
        try:
            checkpoint = store.read(folder, step)
        except DamagedError as error:
            report(f"The checkpoint of step {step} is damaged: {error}.")
            damaged.append(step)
            continue
        for each in damaged if set_aside else ():
            report(f"It is {store.set_aside(folder, each)} now.")
        return checkpoint
    if damaged:
        raise CheckpointError(
            f"Expected a checkpoint in {folder} that can be read; all {len(damaged)} "
            "are damaged. Bring one back from a copy, or give another --logdir."
        )
    return None


def load(checkpoint: Checkpoint, model: keras.Model) -> None:
    """Puts the values of a checkpoint into a model and its optimizer.

    Raises:
        HyperparameterError: If it is of another model or optimizer.
    """
    variables = variable_names.all_variables(model)
    shapes = {name: tuple(x.shape) for name, x in checkpoint.values.items()}
    ours = {name: tuple(v.shape) for name, v in variables.items()}
    for what, difference in (
        ("lacks", ours.keys() - shapes.keys()),
        ("has besides", shapes.keys() - ours.keys()),
        (
            "has in other shapes",
            {n for n in ours.keys() & shapes.keys() if ours[n] != shapes[n]},
        ),
    ):
        if difference:
            names = sorted(difference)
            rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise HyperparameterError(
                "Expected a checkpoint of this model and this optimizer, shards "
                f"included; that of step {checkpoint.metadata.step} {what} "
                f"{', '.join(names[:5])}{rest}. Give the run's own hyperparameters, or "
                "begin a new run with its weights by --set=warm_start.path=DIR."
            )
    for name, value in checkpoint.values.items():
        variables[name].assign(value)


class Checkpoints:
    """Restores a run, and saves it.

    Args:
        folder: Their folder.
        model: A compiled model with a built optimizer.
        saving: Intervals between checkpoints, and the number to keep.
        coordinator: The hosts that train the model, if several do: the chief writes.
    """

    def __init__(
        self,
        folder: Path,
        model: keras.Model,
        saving: Saving,
        coordinator: Coordinator | None = None,
    ) -> None:
        self._folder = folder
        self._model = model
        self._saving = saving
        self.coordinator = coordinator or Coordinator(model)
        self._asked = self._written = -1
        self._waiting: queue.Queue[Checkpoint | None] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None

    def restore(self) -> Metadata | None:
        """Restores the last checkpoint that is whole and returns what it says.

        Raises:
            CheckpointError: If there are some, and none can be read here.
        """
        checkpoint = self._newest()
        if checkpoint is None:
            return None
        load(checkpoint, self._model)
        self._asked = self._written = checkpoint.metadata.step
        return checkpoint.metadata

    def copy(self, step: int, notes: Mapping[str, Any]) -> Checkpoint:
        """Returns a checkpoint of the model after `step` steps."""
        values = variable_names.snapshot(variable_names.all_variables(self._model))
        metadata = Metadata(step=step, time=time.time(), notes=dict(notes))
        return Checkpoint(metadata=metadata, values=values)

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint, or has it written."""
        step = checkpoint.metadata.step
        if step == self._asked:
            return
        self._asked = step
        if not self.coordinator.hosts.is_chief:
            self._written = step
            return
        if not self._saving.async_save:
            self._write(checkpoint)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, daemon=True)
            self._thread.start()
        self._waiting.put(checkpoint)

    def wait(self) -> None:
        """Waits until all is written."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    @property
    def step(self) -> int:
        """The step of the last checkpoint that was restored or asked for."""
        return self._asked

    def check(self) -> None:
        """Checks that the last one is there.

        Raises:
            CheckpointError: If it could not be written.
        """
        if self._written != self._asked:
            raise CheckpointError(
                f"The last checkpoint, of step {self._asked}, could not be written to "
                f"{self._folder}. "
                + (
                    "There is none."
                    if self._written < 0
                    else f"The last that is there is of step {self._written}."
                )
                + " Make room, or let this user write there, and give the same command."
            )

    def _newest(self) -> Checkpoint | None:
        """Reads the last checkpoint that is whole, the same on all hosts."""
        newest = None
        if self.coordinator.hosts.is_chief:
            store.sweep(self._folder)
            newest = latest_valid(self._folder, set_aside=True)
        step = self.coordinator.with_chief(
            -1 if newest is None else newest.metadata.step
        )
        if newest is not None or step == -1:
            return newest
        try:
            return store.read(self._folder, step)
        except DamagedError as error:
            raise CheckpointError(
                f"Expected a --logdir that all hosts see, with the checkpoint of step "
                f"{step} in {self._folder}, which the first has read: {error}."
            ) from None

    def _write_all(self) -> None:
        while (checkpoint := self._waiting.get()) is not None:
            self._write(checkpoint)

    def _write(self, checkpoint: Checkpoint) -> None:
        metadata = checkpoint.metadata
        try:
            while True:
                try:
                    store.write(self._folder, checkpoint)
                    break
                except (OSError, tf.errors.OpError) as error:
                    if not store.is_disk_full(error) or not self._makes_room(metadata):
                        raise
            self._written = metadata.step
            for step in self._steps_to_delete(metadata, keep=self._saving.keep):
                store.remove_step(self._folder, step)
        except Exception as error:  # Whatever it is, training is not to wait for it.
            reason = str(error).partition("\n")[0]
            report(
                f"The checkpoint of step {metadata.step} could not be written: "
                f"{reason}. "
                "Training goes on without it."
            )

    def _makes_room(self, coming: Metadata) -> bool:
        """Removes the oldest checkpoint that one yet to be written makes superfluous.

        Beside that one, the last that is there stays, and all that `saving` keeps for
        other reasons than being among the last.

        Returns: True if there was one.
        """
        going = self._steps_to_delete(coming, keep=2)
        if not going:
            return False
        report(
            f"The disk has no room for the checkpoint of step {coming.step}: that of "
            f"step {going[0]} is removed for it."
        )
        store.remove_step(self._folder, going[0])
        return True

    def _steps_to_delete(self, newest: Metadata, *, keep: int) -> list[int]:
        """Returns the steps of checkpoints that may go, the oldest first.

        Args:
            newest: The last, be it written or not; it names the best.
            keep: Number of the last that stay.
        """
        times = {newest.step: newest.time, **store.elsewhere(self._folder)}
        for step in store.steps(self._folder):
            # It is reported when it is needed.
            with contextlib.suppress(DamagedError, CheckpointError):
                times[step] = store.metadata(self._folder, step).time
        return store.steps_to_delete(
            times,
            keep=keep,
            keep_hours=self._saving.keep_hours,
            best=newest.notes.get("best_step"),
        )
