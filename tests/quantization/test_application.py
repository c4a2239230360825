"""Quantizing models and lists of layers."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tests.helpers.marks import nightly
from tests.quantization.stacks import KERNELS, RAMPED, STACKS, Gated
from tfgpipe import quantization
from tfgpipe._compat import keras_internals
from tfgpipe.quantization import FakeQuantize, QuantizeConfig, QuantizeWrapper

layers = keras.layers


def residual() -> keras.Model:
    """A model with a model inside, an operation, and two inputs of which one counts."""
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(6, activation="relu")])
    numbers, tokens = keras.Input((6,), name="x"), keras.Input((1,), dtype="int32")
    block_in = keras.Input((6,))
    block = keras.Model(block_in, layers.Dense(6)(block_in) + block_in)
    x = block(inner(numbers)) + layers.Flatten()(layers.Embedding(9, 6)(tokens))
    return keras.Model([numbers, tokens], layers.Dense(2, name="last")(x))


def data() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((8, 6), dtype=np.float32),
        rng.integers(0, 9, (8, 1), dtype=np.int32),
    ]


def kinds(model: keras.Model) -> list[str]:
    inner = model._flatten_layers(include_self=False)
    return [type(x).__name__ for x in inner if isinstance(x, layers.Layer)]


def test_a_model_is_copied_with_its_weights_and_stays_as_it_is():
    model = residual()
    before = compare.values(model)
    quantized = quantization.apply(model)
    found = kinds(quantized)
    # One input is of numbers; three sums of operations, and two inside a model.
    assert found.count("FakeQuantize") == 3
    assert found.count("QuantizeWrapper") == 4
    assert "QuantizeWrapper" not in kinds(model)
    kept = {v.path.split("/")[-2]: v.numpy() for v in quantized.trainable_variables}
    for variable in model.trainable_variables:
        assert variable.path.split("/")[-2] in kept
    quantized(data(), training=True)
    y = quantized(data())
    np.testing.assert_allclose(y, model(data()), atol=0.1)
    compare.assert_equal(before, compare.values(model))


def test_a_quantized_model_is_pipelined_like_any():
    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        return quantization.apply(residual())

    plain, pipelined = compare.model_pair(make, num_stages=2, num_microbatches=4)
    compare.assert_runs_the_same(plain, pipelined, data())


def test_ranges_of_weights_are_known_at_once():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, name="d")])
    quantized = quantization.apply(model)
    (low,) = [v for v in quantized.variables if v.name == "kernel_min"]
    np.testing.assert_allclose(low, -np.abs(model.layers[0].kernel).max())
    x = np.ones((2, 3), "float32")
    np.testing.assert_allclose(quantized(x), model(x), atol=0.1)


def test_lists_keep_their_order_their_weights_and_layers_used_twice():
    shared = layers.Dense(5, name="shared")
    built = layers.Dense(5, name="built")
    built.build((None, 5))
    first, *others = quantization.apply([shared, built, shared])
    assert isinstance(first, FakeQuantize)
    assert [x.name for x in others] == ["quant_shared", "quant_built", "quant_shared"]
    assert others[0] is others[2]
    np.testing.assert_array_equal(others[1].layer.kernel, built.kernel)
    assert others[1].layer is not built


def test_inputs_that_are_no_numbers_are_not_quantized():
    found = quantization.apply([layers.Embedding(3, 2), layers.Dense(2)])
    assert [type(x) for x in found] == [QuantizeWrapper, QuantizeWrapper]
    found = quantization.apply([layers.Dense(2)], quantize_inputs=False)
    assert [type(x) for x in found] == [QuantizeWrapper]


def test_only_annotated_layers_are_quantized_if_that_is_asked():
    stack = [
        layers.Dense(2),
        quantization.annotate(layers.Dense(3)),
        quantization.annotate(Gated(4), KERNELS),
    ]
    found = quantization.apply(stack, which="annotated", quantize_inputs=False)
    assert [type(x).__name__ for x in found] == [
        *("Dense", "QuantizeWrapper", "QuantizeWrapper")
    ]


def test_an_annotated_layer_does_what_it_did_and_is_saved(tmp_path):
    dense = layers.Dense(3, activation="relu")
    model = keras.Sequential(
        [keras.Input((4,)), quantization.annotate(dense, QuantizeConfig(output=True))]
    )
    x = np.ones((2, 4), "float32")
    np.testing.assert_array_equal(model(x), dense(x))
    loaded = compare.reloaded(model, tmp_path)
    quantized = quantization.apply(loaded)
    assert quantized.layers[-1].config == QuantizeConfig(output=True)


@pytest.mark.parametrize("kind", ["sequential", "functional"])
def test_a_compiled_model_gives_one_to_compile(kind):
    """A loss may be a function that Keras cannot save."""
    model = residual() if kind == "functional" else sequential()
    model.compile("sgd", lambda y, p: keras.ops.mean((y - p) ** 2))
    quantized = quantization.apply(model)
    assert model.compiled
    assert not quantized.compiled
    quantized.compile("adam", "mse", run_eagerly=True)
    x = data() if kind == "functional" else data()[0]
    quantized.train_on_batch(x, np.ones((8, 2), "float32"))


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(2)])


def test_tokens_are_not_rounded_though_keras_takes_them_for_floats():
    """`keras.Input` is float32 unless it is told."""
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layers.Embedding(1000, 2)(inputs))
    quantized = quantization.apply(model)
    assert "FakeQuantize" not in kinds(quantized)
    tokens = np.array([[0, 997, 998]], "float32")
    quantized(tokens, training=True)
    exact = quantized.layers[-1].layer(tokens)
    np.testing.assert_allclose(quantized(tokens), exact, atol=0.05)


def test_a_mask_is_made_of_what_was_given():
    stack = [layers.Masking(-1.0), layers.Dense(2)]
    masking, _ = found = quantization.apply(stack)
    assert [type(x) for x in found] == [QuantizeWrapper, QuantizeWrapper]
    x = np.array([[[0.3], [-1.0]]], "float32")
    for _ in range(3):
        masking(x, training=True)
    assert keras_internals.calls.get_mask(masking(x)).numpy().tolist() == [
        [True, False]
    ]


def test_what_is_not_built_gives_a_model_that_is_not():
    quantized = quantization.apply(keras.Sequential([layers.Dense(3), layers.Dense(2)]))
    assert isinstance(quantized, keras.Sequential)
    assert quantized(np.ones((2, 4), "float32")).shape == (2, 2)


def test_models_in_lists_and_models_used_twice():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="inner")])
    found = quantization.apply([layers.Dense(4), inner, inner, layers.Dense(2)])
    assert found[2] is found[3]
    assert [type(x).__name__ for x in found[2].layers] == ["QuantizeWrapper"]
    model = keras.Sequential([keras.Input((4,)), inner, inner, layers.Dense(2)])
    quantized = quantization.apply(model)
    assert kinds(quantized).count("QuantizeWrapper") == 2
    np.testing.assert_allclose(quantized(X), model(X), atol=0.15)


X = np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32)


@pytest.mark.parametrize(
    ("what", "pipelined"),
    nightly(
        itertools.product(["model", "wrapper", "layer"], [False, True]),
        gate=[("model", True), ("wrapper", False), ("layer", True)],
    ),
)
def test_models_frozen_after_training_are_saved_and_copied(what, pipelined, tmp_path):
    x = np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32)
    stack = quantization.apply([keras.layers.Dense(3), keras.layers.Dense(2)])
    if pipelined:
        model = tfgpipe.PipelinedModel(stack, num_stages=2, num_microbatches=2)
    else:
        model = keras.Sequential([keras.Input((4,)), *stack])
    model(x, training=True)
    frozen = {"model": model, "wrapper": stack[1], "layer": stack[1].layer}[what]
    frozen.trainable = False
    loaded = compare.reloaded(model, tmp_path)
    np.testing.assert_array_equal(loaded(x), model(x))
    np.testing.assert_allclose(quantization.plain_copy(model)(x), model(x), atol=1e-6)


def test_files_hold_each_weight_once(tmp_path):
    model = keras.Sequential([keras.Input((256,)), layers.Dense(256)])
    model.save(tmp_path / "plain.keras")
    quantization.apply(model).save(tmp_path / "quantized.keras")
    plain, quantized = (
        (tmp_path / f"{name}.keras").stat().st_size for name in ("plain", "quantized")
    )
    assert quantized < 1.3 * plain


def test_layers_that_are_registered_nowhere_are_copied():
    class Own(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel")

        def call(self, x):
            return x @ self.kernel

    stack = quantization.apply([quantization.annotate(Own(), KERNELS)])
    model = keras.Sequential([keras.Input((4,)), *stack])
    model(X, training=True)
    np.testing.assert_allclose(quantization.plain_copy(model)(X), model(X), atol=1e-6)


# (Dropout makes activations larger in training than they are without.)
@pytest.mark.parametrize("name", [name for name in STACKS if name != "dropout"])
def test_training_in_eight_bits_stays_close_to_training_in_single(name):
    """After a few steps, once ranges fit, outputs agree to some levels of 256."""
    chosen = STACKS[name]
    scheme = quantization.default_8bit(activations=RAMPED)
    stack = quantization.apply(chosen.make(), scheme=scheme)
    model = keras.Sequential([keras.Input(chosen.shape, dtype=chosen.dtype), *stack])
    x = chosen.data(8)
    for _ in range(10):
        model(x, training=True)
    bare = [
        x.layer if isinstance(x, QuantizeWrapper) else x
        for x in stack
        if not isinstance(x, FakeQuantize)
    ]
    expected = keras.Sequential([keras.Input(chosen.shape, dtype=chosen.dtype), *bare])
    scale = np.abs(expected(x)).max()
    np.testing.assert_allclose(model(x), expected(x), atol=0.1 * scale)


def test_quantizing_twice_is_refused():
    once = quantization.apply(residual())
    with pytest.raises(ValueError, match=r"quantized once.*fake_quantize"):
        quantization.apply(once)


def test_quantizing_what_is_pipelined_is_refused():
    layer = tfgpipe.PipelinedLayer(
        [layers.Dense(2), layers.Dense(2)], num_stages=2, num_microbatches=1, name="p"
    )
    model = keras.Sequential([keras.Input((2,)), layer])
    with pytest.raises(ValueError, match=r"before they are pipelined.*'p' of type"):
        quantization.apply(model)


def test_layers_without_a_rule_are_refused_before_anything_is_copied():
    with pytest.raises(ValueError, match=r"no rule.*type Gated.*'mine'"):
        quantization.apply([layers.Dense(2), Gated(2, name="mine")])


def test_what_is_no_layer_is_not_annotated():
    with pytest.raises(TypeError, match=r"Received 'dense' of type str"):
        quantization.annotate("dense")
    with pytest.raises(TypeError, match=r"Received 8 of type int for layer 'd'"):
        quantization.annotate(layers.Dense(2, name="d"), 8)


def test_other_choices_are_refused():
    with pytest.raises(ValueError, match=r"which.*'some'"):
        quantization.apply([layers.Dense(2)], which="some")


def test_what_keras_has_quantized_is_refused():
    model = sequential()
    model.quantize("int8")
    with pytest.raises(ValueError, match=r"'int8_from_float32', in which Keras"):
        quantization.apply(model)
    with pytest.raises(ValueError, match=r"'int8_from_float32', in which Keras"):
        QuantizeWrapper(model.layers[0], KERNELS)


def test_annotating_twice_is_refused():
    once = quantization.annotate(layers.Dense(2, name="d"))
    with pytest.raises(ValueError, match=r"'d' is annotated already"):
        quantization.annotate(once)
