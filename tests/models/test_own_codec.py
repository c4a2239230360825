"""An encoding of one's own: every value is sent as two of half precision."""

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tests.helpers import compare


@keras.saving.register_keras_serializable(package="own")
@dataclasses.dataclass(frozen=True)
class HighAndLow(tfgpipe.Codec):
    name = "high_and_low"
    dtype: str = "bfloat16"

    def encode(self, tensor):
        high = tf.cast(tensor, self.dtype)
        return [high, tf.cast(tensor - tf.cast(high, tensor.dtype), self.dtype)]

    def decode(self, encoded, spec):
        high, low = (tf.cast(x, spec.dtype) for x in encoded)
        return high + low

    def num_bytes(self, spec):
        return 4 * math.prod(n or 1 for n in spec.shape)

    def compresses(self, spec):
        return spec.dtype == tf.float64


OWN = HighAndLow("float16")


def model():
    dense = (keras.layers.Dense(8, activation="tanh") for _ in range(4))
    return keras.Sequential([keras.Input((8,)), *dense])


def test_it_trains_nearly_as_the_plain_model_and_is_planned_and_saved(floatx, tmp_path):
    floatx("float64")
    options = {"num_stages": 2, "num_microbatches": 4, "transfer_dtype": OWN}
    pair = compare.model_pair(model, schedule="1f1b", **options)
    x, y = np.random.default_rng(0).normal(size=(2, 16, 8))
    for each in pair:
        each.compile(keras.optimizers.SGD(0.1), "mse")
        each.fit(x, y, 8, shuffle=False, verbose=0)
    pairs = zip(*(each.variables for each in pair), strict=True)
    errors = [np.max(np.abs(a.numpy() - b.numpy())) for a, b in pairs]
    assert 1e-12 < max(errors) < 1e-6
    plan = tfgpipe.plan(model(), batch_size=8, **options)
    assert [stage.received_bytes for stage in plan.stages] == [0, 4 * 2 * 8]
    assert "transfer_dtype=high_and_low" in str(plan)
    loaded = compare.reloaded(pair[1], tmp_path)
    assert loaded.config.transfer_dtype == OWN
    np.testing.assert_array_equal(pair[1](x), loaded(x))
