"""Layers that quantize, alone and in a pipeline."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.quantization.stacks import KERNELS, Attends
from tfgpipe import quantization
from tfgpipe._compat import keras_internals
from tfgpipe.quantization import FakeQuantize, QuantizeConfig, QuantizeWrapper
from tfgpipe.quantization.fake_quant import RANGE_UPDATES

layers = keras.layers
X = np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32)


def value(layer: keras.layers.Layer, name: str) -> np.ndarray:
    (found,) = [v for v in layer.variables if v.name == name]
    return found.numpy()


def test_weights_activations_and_outputs_are_quantized_and_biases_are_not():
    layer = QuantizeWrapper(
        layers.Dense(3, activation="sigmoid", bias_initializer="ones"),
        QuantizeConfig(weights=["kernel"], activations=["activation"], output=True),
    )
    layer.build((None, 4))
    layer.set_weight_ranges()
    kernel, bias = layer.layer.kernel.numpy(), layer.layer.bias.numpy()
    y = layer(X)
    most = np.abs(kernel).max()
    step = most / 127
    rounded = np.round(kernel / step) * step
    before = fake_quantized(X @ rounded + bias, -6, 6)
    after = fake_quantized(1 / (1 + np.exp(-before)), -6, 6)
    np.testing.assert_allclose(y, after, atol=1e-5)


def fake_quantized(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """Returns numbers rounded to 256 levels, with zero among them."""
    step = (high - low) / 255
    zero = np.round(-low / step)
    return (np.clip(np.round(x / step + zero), 0, 255) - zero) * step


def test_the_layer_is_left_as_it_was():
    inner = layers.Dense(3, activation="relu")
    layer = QuantizeWrapper(
        inner, QuantizeConfig(weights=["kernel"], activations=["activation"])
    )
    layer(X)
    assert inner.activation is keras.activations.relu
    expected = keras.activations.relu(X @ inner.kernel.numpy())
    np.testing.assert_allclose(inner(X), expected, rtol=1e-5)


def test_it_is_called_like_the_layer():
    """Several arguments, masks made and taken, `training` handed on."""
    attention = QuantizeWrapper(layers.MultiHeadAttention(2, 3), KERNELS)
    x = np.ones((2, 5, 4), "float32")
    y, scores = attention(x, value=x, return_attention_scores=True)
    assert y.shape == (2, 5, 4)
    assert scores.shape == (2, 2, 5, 5)

    tokens = np.array([[1, 2, 0], [3, 0, 0]])
    embedding = quantization.apply([layers.Embedding(5, 4, mask_zero=True)])[0]
    embedded = embedding(tokens)
    assert (
        keras_internals.calls.get_mask(embedded).numpy().tolist()
        == (tokens != 0).tolist()
    )
    pooled = quantization.apply(
        [layers.GlobalAveragePooling1D()], quantize_inputs=False
    )[0]
    np.testing.assert_allclose(
        pooled(embedded)[1], pooled(embedded[1:, :1])[0], atol=1e-6
    )

    noisy = QuantizeWrapper(layers.GaussianNoise(1.0), QuantizeConfig(output=True))
    assert not np.allclose(noisy(X, training=True), noisy(X, training=False), atol=0.1)


def test_side_inputs_of_a_pipeline_reach_the_layer_inside():
    class Scales(layers.Layer):
        def call(self, x, lengths=None):
            return x * tf.cast(lengths, x.dtype)[:, None]

    scheme = quantization.default_8bit().with_rule(Scales, QuantizeConfig(output=True))
    stack = [layers.Dense(4), Scales(), layers.Dense(2)]
    stack = quantization.apply(stack, scheme=scheme)
    layer = tfgpipe.PipelinedLayer(stack, num_stages=2, num_microbatches=2)
    lengths = np.arange(8, dtype=np.float32)
    once, twice = (layer(X, lengths=n * lengths) for n in (0, 1))
    np.testing.assert_allclose(once - once[:1], 0)
    assert not np.allclose(twice, once)


def test_losses_and_state_of_the_layer_are_kept():
    norm = layers.BatchNormalization(momentum=0.5)
    layer = QuantizeWrapper(norm, QuantizeConfig(output=True))
    layer(X + 2, training=True)
    np.testing.assert_allclose(norm.moving_mean, 0.5 * (X + 2).mean(0), 1e-5)
    regularized = QuantizeWrapper(
        layers.Dense(3, activity_regularizer="l2", kernel_regularizer="l2"), KERNELS
    )
    regularized(X)
    assert len(regularized.losses) == 2
    assert all(loss > 0 for loss in regularized.losses)


def test_per_step_quantizes_with_the_range_before_and_per_call_after():
    observer = quantization.AllValuesRange(initial=(-1.0, 1.0))
    big = np.array([[4.0]], "float32")
    first = FakeQuantize(observer)
    np.testing.assert_allclose(first(big, training=True), 1.0, atol=1e-2)
    np.testing.assert_allclose(first(big), 4.0)
    second = FakeQuantize(observer, range_update="per_call")
    np.testing.assert_allclose(second(big, training=True), 4.0)
    assert value(first, "num_updates") == value(second, "num_updates") == 1


def test_until_the_delay_is_over_ranges_are_only_observed():
    layer = FakeQuantize(quantization.LastValueRange(bits=2), delay=2)
    x = np.array([[0.1, 0.9]], "float32")
    for _ in range(2):
        np.testing.assert_array_equal(layer(x, training=True), x)
    np.testing.assert_allclose(layer(x, training=True), [[0.0, 0.9]], atol=1e-6)
    np.testing.assert_allclose(layer(x), [[0.0, 0.9]], atol=1e-6)


def test_ranges_stay_once_they_are_frozen():
    layer = FakeQuantize(quantization.LastValueRange(), freeze_after=2)
    for most in (1.0, 2.0, 3.0):
        layer(np.array([[most]], "float32"), training=True)
    assert value(layer, "input_max") == 2.0
    assert value(layer, "num_updates") == 3


@pytest.mark.parametrize("range_update", RANGE_UPDATES)
def test_what_is_not_finite_moves_no_range(range_update):
    """An overflow of half precision must not stay in a moving average for good."""
    layer = FakeQuantize(quantization.AllValuesRange(), range_update=range_update)
    for x in (1.0, np.inf, np.nan, 2.0):
        layer(np.array([[x]], "float32"), training=True)
    assert value(layer, "input_max") == 2.0


def test_ranges_of_frozen_layers_and_in_inference_stay():
    layer = QuantizeWrapper(layers.Dense(2), KERNELS)
    layer(X)
    layer.trainable = False
    layer(X, training=True)
    assert value(layer, "num_updates") == 0
    assert value(layer, "output_max") == 6.0


def test_integers_are_not_quantized():
    tokens = np.array([[1, 2]])
    np.testing.assert_array_equal(FakeQuantize()(tokens, training=True), tokens)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float64"])
def test_it_computes_in_the_layers_type_and_keeps_ranges_in_single(policy):
    inner = layers.Dense(3, dtype=policy)
    layer = QuantizeWrapper(inner, KERNELS)
    y = layer(X)
    assert y.dtype == inner(X).dtype == inner.compute_dtype
    ranges = [v for v in layer.variables if v.name.endswith(("min", "max"))]
    assert {v.dtype for v in ranges} == {"float32"}
    assert len(ranges) == 4


@pytest.mark.parametrize(
    ("num_microbatches", "remat"), [(1, "stage"), (4, "none"), (4, "stage")]
)
def test_weights_are_quantized_once_a_step(num_microbatches, remat):
    stack = quantization.apply([layers.Dense(10), layers.Dense(6)])
    layer = tfgpipe.PipelinedLayer(
        stack, num_stages=2, num_microbatches=num_microbatches, remat=remat
    )
    x = tf.ones((8, 8))
    compare.run(layer, x.numpy())
    stage = layer.stages[1]
    (traced,) = [t for known in stage._traced.values() for t in known.values()]
    programs = traced.without_remat if remat == "none" else traced.with_remat
    for program in (programs.forward, programs.backward):
        shapes = [
            tuple(op.inputs[0].shape)
            for op in program.function.graph.get_operations()
            if op.type in ("FakeQuantWithMinMaxVars", "Min", "Max")
        ]
        assert (10, 6) not in shapes
    once = [
        (op.type, tuple(op.inputs[0].shape))
        for made in programs._hoisted.values()
        for op in made.function.graph.get_operations()
        if op.inputs
    ]
    assert once.count(("FakeQuantWithMinMaxVars", (10, 6))) == 1


def test_weights_out_of_their_range_have_no_gradient():
    """The mask of what is clipped is that of the sum over microbatches."""
    observer = quantization.FixedRange(initial=(-0.1, 0.1))
    config = QuantizeConfig(weights={"kernel": observer})

    def stack():
        return [
            QuantizeWrapper(layers.Dense(32, activation="tanh"), config),
            QuantizeWrapper(layers.Dense(3), config),
        ]

    plain, pipelined = compare.pair(
        stack, (4,), "float32", num_stages=2, num_microbatches=4
    )
    expected, received = (compare.run(model, X) for model in (plain, pipelined))
    compare.assert_same(expected, received)
    for variable in pipelined.trainable_variables:
        if variable.name == "kernel":
            (name,) = (n for n in received.weight_grads if n.endswith(variable.path))
            inside = np.abs(variable.numpy()) <= 0.1
            assert 0 < np.mean(inside) < 1
            np.testing.assert_array_equal(received.weight_grads[name] != 0, inside)


def test_names_of_weights_that_are_not_there_are_refused():
    layer = QuantizeWrapper(
        layers.Dense(2, name="d"), QuantizeConfig(weights=["table"])
    )
    with pytest.raises(
        ValueError, match=r"Received 'table' for layer 'd'.*are kernel, bias"
    ):
        layer(X)


def test_a_range_for_each_of_an_unknown_number_is_refused():
    observer = quantization.MovingAverageRange(axis=-1)
    layer = QuantizeWrapper(layers.Dense(2, name="d"), QuantizeConfig(output=observer))
    with pytest.raises(ValueError, match=r"axis=-1 for 'output' of layer 'quant_d'"):
        layer(X)


def test_what_is_no_layer_no_configuration_or_quantized_is_refused():
    with pytest.raises(TypeError, match=r"Received 3 of type int"):
        QuantizeWrapper(3, KERNELS)
    with pytest.raises(TypeError, match=r"Received 'kernel' of type str for layer 'd'"):
        QuantizeWrapper(layers.Dense(2, name="d"), "kernel")
    quantized = QuantizeWrapper(layers.Dense(2, name="d"), KERNELS)
    with pytest.raises(ValueError, match=r"quantized once. Received 'quant_d'"):
        QuantizeWrapper(quantized, KERNELS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"range_update": "always"}, r"range_update.*'always'"),
        ({"delay": -1}, r"`delay` must be an integer of at least 0"),
        ({"freeze_after": 0}, "`freeze_after` must be an integer of at least 1"),
    ],
)
def test_timing_out_of_bounds_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        FakeQuantize(**arguments)


def test_configurations_of_what_observes_nothing_are_refused():
    with pytest.raises(TypeError, match=r"Received 8 of type int.*MovingAverageRange"):
        QuantizeConfig(weights={"kernel": 8})
    with pytest.raises(TypeError, match=r"Use \['kernel'\]"):
        QuantizeConfig(weights="kernel")


def test_layers_with_layers_inside_have_all_their_kernels_quantized():
    layer = QuantizeWrapper(Attends(2), KERNELS)
    layer(np.ones((2, 3, 4), "float32"))
    names = [v.name for v in layer.variables if v.name.endswith("_min")]
    assert names == [
        *("kernel_min", "kernel_1_min", "kernel_2_min", "kernel_3_min"),
        "output_min",
    ]


def test_checkpoints_of_tensorflow_hold_the_ranges(tmp_path):
    def make() -> keras.Model:
        stack = [layers.Dense(3, activation="gelu"), layers.Dense(2)]
        return keras.Sequential([keras.Input((4,)), *quantization.apply(stack)])

    model, other = make(), make()
    model(X, training=True)
    path = tf.train.Checkpoint(model).save(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(other).restore(path).assert_consumed()
    compare.assert_equal(model.variables, other.variables)


@pytest.mark.parametrize("range_update", RANGE_UPDATES)
def test_a_batch_without_rows_moves_nothing(range_update):
    stack = quantization.apply(
        [layers.Dense(3), layers.Dense(2)], range_update=range_update
    )
    model = keras.Sequential([keras.Input((4,)), *stack])
    model(X, training=True)
    before = compare.values(model)
    model(X[:0], training=True)
    compare.assert_equal(before, compare.values(model))


def test_activations_inside_a_loop_are_refused_and_unrolled_ones_are_not():
    config = QuantizeConfig(activations=["cell.activation"])
    x = np.ones((2, 3, 4), "float32")
    looped = QuantizeWrapper(layers.SimpleRNN(3), config)
    with pytest.raises(ValueError, match=r"inside a recurrent.*`unroll=True`"):
        tf.function(lambda: looped(x, training=True))()
    unrolled = QuantizeWrapper(layers.SimpleRNN(3, unroll=True), config)
    assert tf.function(lambda: unrolled(x, training=True))().shape == (2, 3)


def test_tensors_of_a_structure_share_a_range():
    layer = FakeQuantize(quantization.LastValueRange())
    layer([X, 3 * X], training=True)
    assert value(layer, "input_max") == (3 * X).max()
    a, _ = layer([X, 3 * X])
    assert 0 < np.abs(a - X).max() < 0.1


@pytest.mark.parametrize("make", [compare.mirrored, None])
def test_replicas_move_ranges_by_what_all_have_seen(make):
    """As one replica would on all rows."""

    def ranges(model: keras.Model) -> list[np.ndarray]:
        return [v.numpy() for v in model.non_trainable_variables]

    def fitted(*, pipelined: bool) -> keras.Model:
        keras.utils.set_random_seed(0)
        stack = quantization.apply(
            [layers.Dense(3, activation="tanh"), layers.Dense(2)]
        )
        if pipelined:
            stack = [tfgpipe.PipelinedLayer(stack, num_stages=2, num_microbatches=2)]
        model = keras.Sequential([keras.Input((4,)), *stack])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.fit(X, X[:, :2], batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model

    alone = fitted(pipelined=False)
    strategy = (
        make(2)
        if make is not None
        else tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2)
    )
    with strategy.scope():
        several = fitted(pipelined=make is None)
    compare.assert_allclose(ranges(alone), ranges(several), rtol=1e-6)
    for variable in several.non_trainable_variables:
        values = strategy.experimental_local_results(variable.value)
        assert len({np.asarray(v).tobytes() for v in values}) == 1


def test_replicas_that_take_turns_in_a_call_quantize_the_same():
    """Each waits for the others in the middle of the call, at a sum over replicas."""

    class Block(layers.Layer):
        def build(self, shape):
            self.norm = layers.BatchNormalization(synchronized=True)
            self.norm.build(shape)
            self.activation = keras.activations.tanh

        def call(self, x, training=None):
            return self.activation(self.norm(x, training=training))

    def quantized() -> QuantizeWrapper:
        config = QuantizeConfig(
            activations={"activation": quantization.LastValueRange(bits=3)}
        )
        layer = QuantizeWrapper(Block(), config)
        layer.build((None, 4))
        return layer

    alone = quantized()
    expected = alone(X, training=True)
    strategy = compare.mirrored(2)
    with strategy.scope():
        layer = quantized()
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(X[4 * context.replica_id_in_sync_group :][:4])
    )
    step = tf.function(lambda x: strategy.run(layer, (x,), {"training": True}))
    for _ in range(2):
        y = np.concatenate(strategy.experimental_local_results(step(rows)))
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
        expected = alone(X, training=True)
    assert layer.layer.activation is keras.activations.tanh
