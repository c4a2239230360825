"""Calls of functions on the host before and after each action of a real step.

They are where a timed step reads the clock (see `tfgpipe.runtime.timer`), and a device
waits for them: a step of M microbatches and K stages has at least 4 M K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from tfgpipe.runtime.timer import Recorder, StepTimer
from tfgpipe.schedules import Action


class ActionCalls(StepTimer):
    """The calls of one step, while it is being emitted.

    Args:
        begun: Function that is called before an action.
        ended: Function that is called after it.
    """

    def __init__(
        self, begun: Callable[[Action], None], ended: Callable[[Action], None]
    ) -> None:
        super().__init__()
        self._known: list[Action] = []
        self._calls = [self._of(begun), self._of(ended)]

    def _of(self, function: Callable[[Action], None]) -> Callable[..., tf.Tensor]:
        """Returns a function of an action's index and of its device's resource."""

        def on_host(index: np.ndarray) -> np.float64:
            function(self._known[int(index)])
            return np.float64(0.0)

        @tf.function(autograph=False)
        def call(index: tf.Tensor, token: tf.Tensor) -> tf.Tensor:
            del token
            done = tf.numpy_function(on_host, [index], tf.float64)
            return tf.ensure_shape(done, [])

        return call

    def _begun(self, action: Action, token: tf.Tensor) -> tf.Tensor:
        """Calls the function before an action."""
        self._known.append(action)
        return self._call(0, token)

    def _ended(self, action: Action, token: tf.Tensor) -> tf.Tensor:
        """Calls the function after an action."""
        assert self._known[-1] == action
        return self._call(1, token)

    def _call(self, which: int, token: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:0"):
            index = tf.constant(len(self._known) - 1, tf.int32)
        return self._calls[which](index, token)


class HostCalls(Recorder):
    """Calls functions at the actions of each step, and with the gradients of stages.

    Args:
        begun: Function that is called before an action.
        ended: Function that is called after it.
        gradients: Function of a stage's index and its gradients by their weights'
            paths, called once a step; None for no such call.
    """

    def __init__(
        self,
        begun: Callable[[Action], None],
        ended: Callable[[Action], None],
        gradients: Callable[[int, dict[str, np.ndarray]], None] | None,
    ) -> None:
        self._begun, self._ended, self._gradients = begun, ended, gradients

    def step(self) -> ActionCalls:
        """Returns the calls for a step that is traced."""
        return ActionCalls(self._begun, self._ended)

    def record_gradients(
        self, k: int, gradients: Mapping[str, tf.Tensor | None], scale: tf.Tensor
    ) -> None:
        """Calls the function of a stage's gradients, without the scale of the loss."""
        function = self._gradients
        if function is None:
            return
        found = {
            path: tf.convert_to_tensor(x) / tf.cast(scale, x.dtype)
            for path, x in gradients.items()
            if x is not None
        }

        def on_host(*arrays: np.ndarray) -> None:
            function(k, dict(zip(found, arrays, strict=True)))

        tf.numpy_function(on_host, list(found.values()), [])
