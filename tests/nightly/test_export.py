"""Files in 8 bits of more models than the gate has, each trained."""

from __future__ import annotations

import keras
import pytest

import tfgpipe
from tests.quantization import exported
from tests.quantization.exported import SCHEME, data
from tfgpipe.quantization import apply


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.tflite"


@pytest.mark.parametrize(
    "stack", [exported.dense, exported.convolutions, exported.normalized]
)
def test_a_file_gives_the_integers_of_the_model(stack, file):
    # Narrower ranges, as of `SCHEME`, have finer steps, and more that differ.
    model = exported.trained(apply(keras.Sequential(stack())), epochs=2)
    tfgpipe.export_int8(model, file)
    exported.assert_integers_are_the_models(model, file)


def test_attention_and_normalization_are_islands_of_floats(file):
    exported.assert_attention_is_islands_of_floats(file, epochs=2)


def test_a_model_that_was_not_trained_for_it_is_exported_by_what_it_sees(file):
    exported.assert_not_trained_for_it_is_near(file, epochs=2)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_is_rebuilt_in_float32(policy, file):
    exported.assert_mixed_precision_is_rebuilt(policy, file, epochs=2)


@pytest.mark.parametrize("way", exported.WAYS)
def test_a_pipeline_is_exported_like_the_plain_model(way, file, tmp_path):
    stack = apply(keras.Sequential(exported.dense()), scheme=SCHEME)
    model = exported.pipelined(stack, way)
    model(data(stack)[0], training=True)
    alone = exported.exported(stack, tmp_path / "plain.tflite", stack)
    assert exported.exported(model, file, stack) == alone
