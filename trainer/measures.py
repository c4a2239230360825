"""Measurements of a training step beside loss and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

import tfgpipe
from tfgpipe_trainer import devices
from tfgpipe_trainer.checkpoint import variable_names
from tfgpipe_trainer.experiment import Experiment
from tfgpipe_trainer.optimizers import ApplyIfFinite


class Measures:
    """Work, memory and norms of a step.

        flops_per_second   of the model: forward and backward, without recomputation
        mfu                the share of that in what the devices could, if it is known
                           (model FLOPs utilisation, Chowdhery et al. 2022, appendix B)
        bubble             of the schedule, simulated with the FLOPs of the stages
        memory             bytes of the fullest device, or of the process
        gradient_norm, weight_norm, update_norm     with `optimizer.log_norms`

    Args:
        experiment: The experiment that is trained.
        model: Its model.
    """

    def __init__(self, experiment: Experiment, model: tfgpipe.PipelinedModel) -> None:
        self._model = model
        self._norms = experiment.optimizer.log_norms
        self._before: dict[str, Any] = {}
        size = experiment.training.batch_size
        self._flops = self.bubble = math.nan
        # A model that cannot be planned trains all the same.
        try:
            plan = model.plan(batch_size=size)
            each = [x.flops.forward + x.flops.backward for x in plan.profile.layers]
            self._flops = size * sum(each) / plan.profile.num_examples
            self.bubble = plan.bubble
        except Exception as error:
            reason = str(error).partition("\n")[0]
            print(f"FLOPs are not logged: {type(error).__name__}: {reason}")
        self._peak = devices.peak_flops(experiment.precision.policy)
        self._peak *= experiment.pipelining.num_devices

    def begin(self) -> None:
        """Copies the weights before a step that is to be measured."""
        if self._norms:
            self._before = variable_names.snapshot(self._weights())

    def end(self, seconds: float) -> dict[str, float]:
        """Returns the measurements of a step of a duration, after it."""
        found = {"memory": float(devices.memory_in_use()[1]), "bubble": self.bubble}
        found["flops_per_second"] = self._flops / seconds
        found["mfu"] = found["flops_per_second"] / self._peak
        if self._before:
            after = self._weights()
            found["weight_norm"] = _norm(v.value for v in after.values())
            moved = (v.value - self._before[name] for name, v in after.items())
            found["update_norm"] = _norm(moved)
            self._before = {}
        optimizer = self._model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        if self._norms and isinstance(optimizer, ApplyIfFinite):
            norm = keras.ops.convert_to_numpy(optimizer.gradient_norm)
            found["gradient_norm"] = float(norm)
        return {n: x for n, x in found.items() if not math.isnan(x)}

    def _weights(self) -> dict[str, keras.Variable]:
        trained = {id(v) for v in self._model.trainable_variables}
        found = variable_names.weights(self._model).items()
        return {name: v for name, v in found if id(v) in trained}


def _norm(tensors: Iterable[Any]) -> float:
    """Returns the norm of all numbers, each summed on its own device."""
    squares = [tf.reduce_sum(tf.square(tf.cast(x, tf.float32))) for x in tensors]
    return math.sqrt(sum(float(each) for each in squares))
