"""Files in 8 bits: the same numbers as the model that was trained for them."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers.marks import nightly
from tests.quantization import exported
from tests.quantization.exported import SCHEME, data, dense, normalized, trained
from tfgpipe.quantization import (
    FakeQuantize,
    MovingAverageRange,
    QuantizeConfig,
    annotate,
    apply,
    compare,
    plain_copy,
    quantize_after_training,
)

layers = keras.layers


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.tflite"


@pytest.fixture(scope="module")
def dense_file(tmp_path_factory) -> tuple[keras.Model, Path]:
    """A model that was trained for 8 bits, and its file."""
    keras.utils.set_random_seed(0)
    # Narrower ranges, as of `SCHEME`, have finer steps, and more that differ.
    model = trained(apply(keras.Sequential(dense())), epochs=2)
    path = tmp_path_factory.mktemp("dense") / "model.tflite"
    tfgpipe.export_int8(model, path)
    return model, path


# What the file computes.


def test_a_file_gives_the_integers_of_the_model(dense_file):
    exported.assert_integers_are_the_models(*dense_file)


def test_normalizations_are_folded_into_convolutions(file):
    model = trained(apply(keras.Sequential(normalized())), epochs=1)
    tfgpipe.export_int8(model, file)
    exported.assert_integers_are_the_models(model, file)


@pytest.mark.nightly
@pytest.mark.parametrize("stack", [exported.convolutions, normalized])
def test_files_of_other_stacks_give_the_integers_of_the_model(stack, file):
    model = trained(apply(keras.Sequential(stack())), epochs=2)
    tfgpipe.export_int8(model, file)
    exported.assert_integers_are_the_models(model, file)


@pytest.mark.parametrize("epochs", [0, *nightly([2])])
def test_attention_and_normalization_are_islands_of_floats(epochs, file):
    model = trained(apply(exported.attention(), scheme=SCHEME), epochs=epochs)
    tfgpipe.export_int8(model, file)
    compared = compare(model, file, data(model))
    assert {"norm", "attention", "query"} <= set(compared.operations.floats)
    assert compared.operations.floats["attention"]["SOFTMAX"] == 1
    assert "last" not in compared.operations.floats
    assert "1 SOFTMAX" in str(compared)
    assert compared.largest_difference <= 8

    # With inputs to see they are integers too, further away from the model.
    tfgpipe.export_int8(model, file, data(model)[0])
    calibrated = compare(model, file, data(model))
    assert calibrated.operations.num_floats < compared.operations.num_floats


def test_a_table_says_how_near_the_file_comes(dense_file):
    compared = compare(*dense_file, data(dense_file[0]))
    lines = dict(re.split(r"  +", li, maxsplit=1) for li in str(compared).splitlines())
    assert lines["identical outputs"] == f"{compared.num_identical} of 2560"
    assert lines["accuracy of the file"] == f"{compared.int8_accuracy:.2%}"
    assert lines["operations with floats"] == "0 of 3"


def test_data_come_as_arrays_or_datasets(dense_file):
    x, y = data(dense_file[0])
    whole = compare(*dense_file, (x, y))
    for kind, given in {
        "arrays": x,
        "labels": (x, keras.utils.to_categorical(y, 10)),
        "dataset": tf.data.Dataset.from_tensor_slices((x, y)).batch(100),
        "dataset of inputs": tf.data.Dataset.from_tensor_slices(x).batch(100),
    }.items():
        compared = compare(*dense_file, given)
        assert compared.num_outputs == 2560, kind
        assert compared.num_identical == whole.num_identical, kind
        labelled = kind in ("labels", "dataset")
        assert compared.accuracy == (whole.accuracy if labelled else None), kind
        found = compared.int8_accuracy
        assert found == (whole.int8_accuracy if labelled else None), kind


def test_several_inputs_and_outputs_keep_their_order(file):
    zeta, alpha = keras.Input((4,), name="zeta"), keras.Input((5,), name="alpha")
    both = layers.Concatenate()([layers.Dense(3)(zeta), layers.Dense(3)(alpha)])
    outputs = [layers.Dense(2)(both), layers.Dense(3)(both)]
    model = keras.Model([zeta, alpha], outputs)
    random = np.random.default_rng(0)
    x = [random.standard_normal((64, n)).astype("float32") for n in (4, 5)]
    tfgpipe.export_int8(model, file, x)
    assert compare(model, file, x).largest_difference <= 4
    model = apply(model, scheme=SCHEME)
    model(x, training=True)
    tfgpipe.export_int8(model, file)
    compared = compare(model, file, x)
    assert compared.num_outputs == 64 * 5
    assert compared.largest_difference <= 1


@pytest.mark.parametrize("epochs", [0, *nightly([2])])
def test_a_model_that_was_not_trained_for_it_is_exported_by_what_it_sees(epochs, file):
    model = trained(keras.Sequential(normalized()), epochs=epochs)
    tfgpipe.export_int8(model, file, data(model)[0])
    compared = compare(model, file, data(model))
    assert compared.operations.num_floats == 0
    assert compared.largest_difference <= 4
    assert compared.int8_accuracy == pytest.approx(compared.accuracy, abs=0.05)


# The copy that is written.


@pytest.mark.parametrize(
    ("policy", "epochs"),
    [
        ("mixed_float16", 0),
        *nightly([("mixed_float16", 2), ("mixed_bfloat16", 2)]),
    ],
)
def test_mixed_precision_is_rebuilt_in_float32(policy, epochs, file):
    keras.config.set_dtype_policy(policy)
    try:
        model = trained(apply(keras.Sequential(dense()), scheme=SCHEME), epochs=epochs)
        before = [np.asarray(v) for v in model.weights]
        copy = plain_copy(model)
        tfgpipe.export_int8(model, file)
        assert keras.config.dtype_policy().name == policy
    finally:
        keras.config.set_dtype_policy("float32")
    assert {layer.dtype_policy.name for layer in copy.layers} == {"float32"}
    assert {layer.compute_dtype for layer in model.layers[1:]} == {policy[6:]}
    for variable, old, new in zip(model.weights, before, copy.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(variable), old)
        np.testing.assert_array_equal(np.asarray(new), old)
    compared = compare(model, file, data(model))
    assert compared.identical >= 0.98
    assert compared.largest_difference <= 1


def test_a_pipeline_is_exported_like_the_plain_model(tmp_path):
    stack = apply(keras.Sequential(dense()), scheme=SCHEME)
    models = {way: exported.pipelined(stack, way) for way in exported.WAYS}
    models["model"](data(stack)[0], training=True)
    alone = exported.exported(stack, tmp_path / "plain.tflite", stack)
    for way, model in models.items():
        found = exported.exported(model, tmp_path / f"{way}.tflite", stack)
        assert found == alone, way


@pytest.mark.nightly
@pytest.mark.parametrize("way", exported.WAYS)
def test_a_pipeline_that_sees_ranges_is_exported_like_the_plain_model(
    way, file, tmp_path
):
    stack = apply(keras.Sequential(dense()), scheme=SCHEME)
    model = exported.pipelined(stack, way)
    model(data(stack)[0], training=True)
    alone = exported.exported(stack, tmp_path / "plain.tflite", stack)
    assert exported.exported(model, file, stack) == alone


def test_a_pipeline_in_a_functional_model_is_undone_with_its_side_inputs():
    class Scaled(layers.Layer):
        def call(self, x, scale):
            return x * scale

    keras.saving.register_keras_serializable("test_export")(Scaled)
    x, scale = keras.Input((4,)), keras.Input((4,))
    pipelined = tfgpipe.PipelinedLayer(
        [layers.Dense(4), Scaled(), layers.Dense(4)], num_stages=2, num_microbatches=2
    )
    model = keras.Model([x, scale], layers.Dense(2)(pipelined(x, scale=scale)))
    copy = plain_copy(model)
    inputs = [np.random.rand(6, 4).astype("float32") for _ in range(2)]
    np.testing.assert_allclose(copy(inputs), model(inputs), rtol=1e-5, atol=1e-6)
    names = {type(inner).__name__ for inner in copy.layers}
    assert "PipelinedLayer" not in names


def test_what_was_to_start_later_has_started_in_the_copy():
    model = apply(keras.Sequential(dense()), scheme=SCHEME, delay=1000)
    model(data(model)[0], training=True)
    delays = {x.schedule.delay for x in plain_copy(model).layers}
    assert delays == {0}
    assert {x.schedule.delay for x in model.layers} == {1000}


def test_keras_quantizes_a_copy_after_training():
    model = keras.Sequential(dense())
    x, _ = data(model)
    before = np.asarray(model(x))
    pipelined = tfgpipe.pipeline(model, num_stages=2, num_microbatches=2)
    copy = quantize_after_training(pipelined)
    assert {x.dtype_policy.name for x in copy.layers} == {"int8_from_float32"}
    np.testing.assert_array_equal(np.asarray(pipelined.unpipelined()(x)), before)
    np.testing.assert_allclose(copy(x), before, atol=0.1)


# What is refused.


def _refused(error: type[Exception], words: str, model, file, *args) -> None:
    file.write_text("kept")
    with pytest.raises(error) as raised:
        tfgpipe.export_int8(model, file, *args)
    assert re.search(words, str(raised.value)), str(raised.value)
    assert file.read_text() == "kept"
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_model_that_has_seen_no_range_is_refused(file):
    words = (
        r"^Activations are quantized by ranges that were seen in training\. Received "
        r"layers 'fake_quantize', 'quant_dense', 'quant_dense_1' and 1 more, "
        r"which have seen none\. Train the model, or run `model\(x, training=True\)`"
    )
    model = apply(keras.Sequential(dense()))
    _refused(ValueError, words, model, file)
    _refused(ValueError, words, model, file, np.zeros((4, 16), "float32"))


def test_a_model_without_ranges_needs_inputs(file):
    words = "Received 'sequential', which was not trained with any, and representative"
    _refused(ValueError, words, keras.Sequential(dense()), file)


def test_inputs_by_which_no_range_is_found_are_refused(file):
    model, begin = keras.Sequential(dense()), "^Ranges are found by `representative`, "
    spoilt = np.full((4, 16), np.nan, "float32")
    _refused(ValueError, f"{begin}.* Received NaN or infinity in", model, file, spoilt)
    _refused(ValueError, f"{begin}.* Received none", model, file, spoilt[:0])


def test_a_model_that_keras_has_quantized_is_refused(file):
    model = keras.Sequential(dense())
    model.quantize("int8")
    words = "Received layer 'dense' with the dtype policy 'int8_from_float32', in which"
    _refused(ValueError, words, model, file)
    with pytest.raises(ValueError, match="in which Keras has quantized it"):
        quantize_after_training(model)


def test_a_model_trained_for_8_bits_is_not_quantized_after_training():
    model = apply(keras.Sequential(dense()))
    with pytest.raises(ValueError, match="'fake_quantize', which quantizes already"):
        quantize_after_training(model)


def test_another_file_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a file `\*\.tflite`. Received '.*\.bin'"):
        tfgpipe.export_int8(keras.Sequential(dense()), tmp_path / "model.bin")


def test_what_is_no_built_model_is_refused(file):
    _refused(TypeError, "exported is a Keras model. Received", layers.Dense(2), file)
    words = "exported once it is built. Received 'sequential', which is not. Call it"
    _refused(ValueError, words, keras.Sequential([layers.Dense(2)]), file)


def test_two_classes_of_one_name_are_refused():
    class Scale(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    def other():
        class Scale(keras.layers.Layer):
            def call(self, x):
                return 3 * x

        return Scale()

    model = keras.Sequential([keras.Input((2,)), Scale(), other()])
    with pytest.raises(ValueError, match=r"Received two classes 'Scale', .*Rename one"):
        plain_copy(model)
    copy = plain_copy(keras.Sequential([keras.Input((2,)), Scale(), Scale()]))
    np.testing.assert_array_equal(copy(np.ones((1, 2))), [[4.0, 4.0]])


def test_a_model_with_a_call_of_its_own_is_refused(file):
    class Own(keras.Model):
        def call(self, x):
            return x

    model = Own(name="own")
    model(np.zeros((4, 4), "float32"))
    words = "is a Functional or Sequential model.*Received 'own' of type Own, which has"
    _refused(TypeError, words, model, file)


@pytest.mark.parametrize(
    ("stack", "options", "words"),
    [
        (dense, {"quantize_inputs": False}, "'sequential', which takes floats"),
        (
            lambda: [*dense()[:-1], annotate(layers.Dense(4), QuantizeConfig())],
            {},
            "which gives floats that are not quantized. End with a layer that is",
        ),
    ],
)
def test_ends_that_are_not_quantized_are_refused(stack, options, words, file):
    model = apply(keras.Sequential(stack()), scheme=SCHEME, **options)
    model(data(model)[0], training=True)
    _refused(ValueError, words, model, file)


@keras.saving.register_keras_serializable("test_export")
class SingularValues(layers.Layer):
    def call(self, x):
        return tf.linalg.svd(x, compute_uv=False)


def test_an_operation_that_tflite_lacks_is_named_with_its_layer(file):
    model = keras.Sequential(
        [
            keras.Input((16,)),
            FakeQuantize(),
            layers.Reshape((4, 4)),
            SingularValues(name="values"),
            FakeQuantize(),
        ]
    )
    model(data(model)[0], training=True)
    words = (
        "^TFLite's converter failed on 'sequential'. .* Received 'values' of type "
        "SingularValues. Replace the layer .* The converter says: .*Svd"
    )
    _refused(RuntimeError, words, model, file)


def test_a_layer_that_the_converter_fails_on_is_named(file):
    each_channel = QuantizeConfig(
        weights={"kernel": MovingAverageRange(axis=-1)}, output=True
    )
    model = apply(
        keras.Sequential(
            [
                keras.Input((8, 3)),
                annotate(layers.Conv1D(4, 3, name="conv"), each_channel),
                layers.Flatten(),
            ]
        ),
        scheme=SCHEME,
    )
    model(data(model)[0], training=True)
    words = "failed on 'sequential'. .* Received 'conv' of type Conv1D. .* says: .*conv"
    _refused(RuntimeError, words, model, file)


def test_comparing_needs_a_file_and_data(dense_file, tmp_path):
    model, path = dense_file
    with pytest.raises(FileNotFoundError, match=r"no file to compare with: .*export_"):
        compare(model, tmp_path / "model.tflite", data(model))
    with pytest.raises(ValueError, match=r"data\. Received no examples"):
        compare(model, path, np.zeros((0, 16), "float32"))
