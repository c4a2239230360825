"""`tests/distribution/test_losses_and_metrics.py` with every metric of Keras."""

from __future__ import annotations

import keras

from tests.distribution import test_losses_and_metrics as short


def test_replicas_have_the_metrics_of_all_rows(floatx):
    names = short.classes_of(keras.metrics)
    assert len(names) > 40
    short.test_replicas_have_those_of_all_rows(
        floatx, lambda: short.metrics(names), "float32", 1e-5
    )
