"""A hundred steps of tfmot's `quantize_model` beside ours, bit for bit."""

from __future__ import annotations

import pytest

from tests.helpers.subprocesses import interpret
from tests.quantization.external_quantizers import (
    MODELS,
    assert_external_quantizers_train_as_tfmot,
    assert_trains_as_tfmot,
)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_hundred_steps_are_those_of_tfmot(model, num_stages):
    assert_trains_as_tfmot(model, num_stages=num_stages, num_steps=100)


@pytest.mark.parametrize("kind", ["configurations", "quantizers"])
def test_external_quantizers_do_the_same(kind):
    assert_external_quantizers_train_as_tfmot(kind, num_steps=100)


def test_the_library_stays_out_until_it_is_asked_for_and_leaves_nothing_behind():
    code = """
import os, sys
import keras, tensorflow as tf, tfgpipe
from tfgpipe import quantization
quantization.apply([keras.layers.Dense(2)])
assert not [name for name in sys.modules if name.startswith("tensorflow_model_opt")]
assert "tf_keras" not in sys.modules
from tfgpipe.quantization import tfmot
tfmot.library()
assert "TF_USE_LEGACY_KERAS" not in os.environ
assert tf.keras.Model is keras.Model
os.environ["TF_USE_LEGACY_KERAS"] = "0"
tfmot.library.cache_clear()
tfmot.library()
assert os.environ["TF_USE_LEGACY_KERAS"] == "0"
"""
    run = interpret(code, without={"TF_USE_LEGACY_KERAS"})
    assert run.returncode == 0, run.stderr
