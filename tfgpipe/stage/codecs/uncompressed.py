"""No compression: values are sent as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfgpipe._util import num_bytes
from tfgpipe.stage.codecs.codec import Codec, Spec


@dataclasses.dataclass(frozen=True)
class Uncompressed(Codec):
    """Sends values as they are."""

    name = "none"

    def encode(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns the value."""
        return [tensor]

    def decode(self, encoded: Sequence[tf.Tensor], spec: tf.TensorSpec) -> tf.Tensor:
        """Returns the value."""
        del spec
        return encoded[0]

    def num_bytes(self, spec: Spec) -> int:
        """Returns the bytes of the value."""
        return num_bytes(spec)

    def compresses(self, spec: Spec) -> bool:
        """Returns False."""
        del spec
        return False
