"""A layer that notes what it is run on."""

from __future__ import annotations

import keras
import tensorflow as tf

LOG: list[tuple[str, int, int]] = []


class Logs(keras.layers.Layer):
    """The identity; notes the first number of each microbatch it sees, both ways."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def call(self, x):
        @tf.custom_gradient
        def logged(x):
            y = self._note("forward", x, x)
            return y, lambda dy: self._note("backward", dy, x)

        return logged(x)

    def _note(self, kind, value, x):
        def note(value, x):
            LOG.append((kind, self.stage, round(float(x.flat[0]))))
            return value

        noted = tf.numpy_function(note, [value, x], value.dtype)
        return tf.ensure_shape(noted, value.shape)
