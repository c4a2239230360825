"""Which document of a window a byte belongs to, and what follows from that."""

from __future__ import annotations

from typing import Any

import keras

from params import packing

ops = keras.ops


@keras.saving.register_keras_serializable(package="params")
class Segments(keras.layers.Layer):
    """Numbers the documents of a window, each from its start on.

    Input shape:
        `(batch_size, length)`, bytes.

    Output shape:
        The same, of type int32.

    Example:

    >>> from params.segments import Segments
    >>> print(Segments()(np.array([[0, 65, 66, 0, 67]])).numpy())
    [[1 1 1 2 2]]
    """

    config_is_complete = True

    def call(self, inputs: Any) -> Any:
        """Returns the number of each byte's document."""
        starts = ops.cast(ops.equal(inputs, packing.START), "int32")
        return ops.cumsum(starts, axis=1)


def same(segments: Any) -> Any:
    """Returns which bytes are of one document, `[batch_size, length, length]`."""
    return ops.equal(segments[:, :, None], segments[:, None, :])


def places(segments: Any) -> Any:
    """Returns how many bytes of its document stand before each byte.

    >>> print(places(ops.array([[1, 1, 1, 2, 2]])).numpy())
    [[0 1 2 0 1]]

    Args:
        segments: Numbers of documents. # [batch_size, length]
    """
    before = ops.tril(ops.cast(same(segments), "int32"), k=-1)
    return ops.sum(before, axis=-1)
