"""A plain and a pipelined model that exist already, compared."""

from __future__ import annotations

import keras
import numpy as np

from tests.helpers import compare


def assert_fits_the_same(plain, pipelined, x, y, compile_arguments, **fit_arguments):
    """The last batch is a smaller one."""
    histories = []
    for model in (plain, pipelined):
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), **compile_arguments())
        fitted = model.fit(
            x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, **fit_arguments
        )
        histories.append(fitted.history)
    assert_same_numbers(*histories)
    compare.assert_allclose(plain.variables, pipelined.variables, 1e-5, 1e-5)


def assert_same_numbers(expected, received):
    assert list(expected) == list(received)
    for key, values in expected.items():
        np.testing.assert_allclose(values, received[key], 1e-5, 1e-6, err_msg=key)


class Chain(keras.Model):
    """The plain model of a list of layers with side inputs."""

    def __init__(self, stack):
        super().__init__()
        self.stack = list(stack)

    def call(
        self, x, training=None, lengths=None, segment_ids=None, allowed=None, scale=None
    ):
        sides = {
            "lengths": lengths,
            "segment_ids": segment_ids,
            "allowed": allowed,
            "scale": scale,
        }
        for layer in self.stack:
            asked = {
                n: t for n, t in sides.items() if n in layer._call_signature.parameters
            }
            x = layer(x, **asked)
        return x
