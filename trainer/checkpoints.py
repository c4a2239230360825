"""Checkpoints of all that an exact restart needs."""

from __future__ import annotations

from pathlib import Path

import keras
import tensorflow as tf


class Checkpoints:
    """The last few checkpoints of a run.

    Besides the model, the optimizer and the step they hold each variable that is not
    trained: `tf.train.Checkpoint` by itself misses the states of random seeds, such as
    dropout's, and the ranges of quantized layers.

    Args:
        folder: Where they are.
        model: A compiled model with a built optimizer.
    """

    def __init__(self, folder: Path, model: keras.Model) -> None:
        state = [variable.value for variable in model.non_trainable_variables]
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._checkpoint = tf.train.Checkpoint(
            model=model, optimizer=model.optimizer, state=state, step=self._step
        )
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, str(folder), max_to_keep=3
        )

    def restore(self) -> int | None:
        """Restores the last checkpoint and returns its step, or None without one."""
        path = self._manager.latest_checkpoint
        if path is None:
            return None
        self._checkpoint.restore(path).assert_consumed()
        return int(self._step.numpy())

    def save(self, step: int) -> None:
        """Saves a checkpoint after `step` steps."""
        self._step.assign(step)
        self._manager.save(checkpoint_number=step)
