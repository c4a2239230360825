"""The boundary between stages: which values are encoded on their way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from tfgpipe._util import num_bytes
from tfgpipe.stage.codecs import Codec, Spec


@dataclasses.dataclass(frozen=True)
class Boundary:
    """The way of values from stage to stage.

    Attributes:
        codec: The encoding.
        uncompressed: Ids of the values that are sent as they are: a model's outputs.
    """

    codec: Codec
    uncompressed: tuple[int, ...] = ()

    def compresses(self, value_id: int, spec: Spec) -> bool:
        """Returns whether a value is encoded, as only floating point numbers are."""
        is_floating = tf.as_dtype(spec.dtype).is_floating
        if value_id in self.uncompressed or not is_floating:
            return False
        return self.codec.compresses(spec)

    def encoded_bytes(self, specs: Mapping[int, Spec]) -> dict[int, int]:
        """Returns the bytes that are sent of each value; sizes not known are one."""
        return {
            value_id: self.codec.num_bytes(spec)
            if self.compresses(value_id, spec)
            else num_bytes(spec)
            for value_id, spec in specs.items()
        }
