"""What happens at a loss, or a gradient, that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from params.experiment import Training
from params.guard import Guard
from trainer import state
from trainer.errors import DivergedError
from trainer.notes import Notes
from trainer.steps import StepCallback


class Finiteness(StepCallback):
    """Ends a run at a step that is not finite, or has it left out.

    The optimizer itself leaves weights and slots as they were (see `params.guard`). Of
    what layers learn in the forward pass, as moving averages, copies are kept from
    before the step where steps are to be left out.

    Args:
        training: What to do, and how often.
        notes: What the run remembers.
        first_step: Steps that were done before.
        batch: Returns the batch of a step again, which may be what is not finite.
    """

    def __init__(
        self,
        training: Training,
        notes: Notes,
        *,
        first_step: int,
        batch: Callable[[int], Any] | None = None,
    ) -> None:
        super().__init__(first_step=first_step)
        self._batch = batch
        self._training = training
        self._notes = notes
        self._num_left_out = 0
        self._learnt: state.State = {}
        self._before: dict[str, Any] = {}

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Looks how many steps were left out before, and what a step may spoil."""
        self._num_left_out = self._count()
        if self._training.nonfinite == "skip":
            self._learnt = {
                str(i): v
                for i, v in enumerate(self.model.non_trainable_variables)
                if keras.backend.is_float_dtype(v.dtype)
            }

    def begin(self, step: int) -> None:
        """Copies what a step may spoil."""
        self._before = state.copies(self._learnt)

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
        if math.isfinite(loss) and count == self._num_left_out:
            return
        what = f"the loss is {loss} at step {step}"
        if count == self._num_left_out and scale is None:
            # The gradients are finite, so the weights have moved: nothing to leave out.
            self._check_batch(step)
            raise DivergedError(f"{what}. Try a smaller optimizer.learning_rate")
        if count != self._num_left_out:
            what += f", and the gradient of {self._culprits()}"
        self._num_left_out = count
        skipped = self._notes.skipped
        if self._training.nonfinite == "stop":
            self._check_batch(step)
            raise DivergedError(
                f"{what}. Try a smaller optimizer.learning_rate, or leave such steps "
                "out with --set=training.nonfinite=skip"
            )
        if len(skipped) >= self._training.max_skips:
            self._check_batch(step)
            raise DivergedError(
                f"{what}. Steps {', '.join(map(str, skipped))} were left out before "
                "it, as many as training.max_skips allows. Try a smaller "
                "optimizer.learning_rate"
            )
        for name, value in self._before.items():
            self._learnt[name].assign(value)
        skipped.append(step)
        print(f"\nStep {step} is left out: {what}.", flush=True)

    def _check_batch(self, step: int) -> None:
        """Raises DivergedError if what a step trained on is not finite itself."""
        found = "" if self._batch is None else not_finite(self._batch(step))
        if found:
            raise DivergedError(
                f"the data of step {step} hold {found}. Mend the data, or leave such "
                "steps out with --set=training.nonfinite=skip"
            )

    def _guard(self) -> Guard | None:
        optimizer = self.model.optimizer
        return optimizer if isinstance(optimizer, Guard) else None

    def _count(self) -> int:
        guard = self._guard()
        return int(keras.ops.convert_to_numpy(guard.num_left_out)) if guard else 0

    def _scale(self) -> float | None:
        """Returns by what the loss is scaled; an overflow leaves its step out, too."""
        optimizer = self.model.optimizer
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return None
        return float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))

    def _culprits(self) -> str:
        """Says whose gradient was not finite, the backward pass' first one first."""
        guard = self._guard()
        assert guard is not None  # It has counted.
        finite = np.asarray(keras.ops.convert_to_numpy(guard.was_finite))
        names = {id(v): name for name, v in state.weights(self.model).items()}
        named = [names[id(v)] for v in self.model.trainable_variables]
        spoilt = [n for n, fine in zip(named, finite, strict=True) if not fine]
        others = f", then {len(spoilt) - 1} more" if len(spoilt) > 1 else ""
        return f"{spoilt[-1]} was the first that is not finite{others}"


def not_finite(batch: Any) -> str:
    """Returns which value of a batch is not finite, or an empty text.

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
