"""Attention over sequences in parts, against Keras' own layers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tfgpipe.layers import TPSequenceAttention

L, FEATURES = 10, 6
RNG = np.random.default_rng(1)
X, OTHER = RNG.normal(size=(3, L, FEATURES)), RNG.normal(size=(3, 7, FEATURES))
PADDING = np.arange(L) < np.array([[10], [6], [9]])
PAIRS = RNG.uniform(size=(3, L, L)) < 0.7
EXCHANGES = ["ring", "all_to_all"]


def pair(T, *, heads=4, few=None, exchange="ring", x=X, other=None, **kwargs):
    """Returns Keras' layer and the one in parts, built, with equal weights."""
    compare.fresh_names()
    if few is None:
        plain = keras.layers.MultiHeadAttention(heads, 3, value_dim=2, **kwargs)
        kwargs["value_dim"] = 2
    else:
        plain = keras.layers.GroupQueryAttention(3, heads, few, **kwargs)
    parts = TPSequenceAttention(
        heads,
        key_dim=3,
        num_key_value_heads=few,
        exchange=exchange,
        num_shards=T,
        **kwargs,
    )
    other = x if other is None else other
    for layer in (plain, parts):
        layer.build(x.shape, other.shape)
    rng = np.random.default_rng(2)
    weights = [rng.normal(size=w.shape) / 2 for w in plain.get_weights()]
    plain.set_weights(weights)
    parts.set_weights(weights)
    return plain, parts


def results(layer, x, other=None, traced=True, **kwargs):
    """Returns the output and all gradients."""

    def step(x, *other):
        with tf.GradientTape() as tape:
            tape.watch([x, *other])
            y = layer(x, *(other or [x]), **kwargs)
            loss = compare.squares(y)
        return y, *tape.gradient(loss, [x, *other, *layer.trainable_weights])

    arrays = [tf.constant(a) for a in (x, other) if a is not None]
    return (tf.function(step) if traced else step)(*arrays)


def assert_equal(pair, *arrays, what="", **kwargs):
    found = [results(layer, *arrays, **kwargs) for layer in pair]
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        compare.close(a, b, f"{what} {i}", 1e-10, 1e-12)


MASKS = {
    "none": {},
    "causal": {"use_causal_mask": True},
    "padding": {"value_mask": PADDING},
    "causal, padding": {"use_causal_mask": True, "value_mask": PADDING},
    "pairs": {"attention_mask": PAIRS},
    "causal, pairs of all": {"use_causal_mask": True, "attention_mask": PAIRS[:1]},
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("masks", MASKS)
def test_outputs_and_gradients_are_those_of_keras(floatx, exchange, masks):
    floatx("float64")
    T = 4 if exchange == "all_to_all" else 3
    assert_equal(pair(T, exchange=exchange), X, what=masks, **MASKS[masks])


@pytest.mark.parametrize(
    ("T", "few", "exchange"), [(3, 2, "ring"), (4, 1, "ring"), (2, 2, "all_to_all")]
)
def test_grouped_queries(floatx, T, few, exchange):
    floatx("float64")
    layers = pair(T, few=few, exchange=exchange, use_bias=False)
    assert_equal(layers, X, use_causal_mask=True)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_two_sequences_of_other_lengths(floatx, exchange):
    floatx("float64")
    layers = pair(2, exchange=exchange, other=OTHER)
    assert_equal(layers, X, OTHER)
    assert_equal(layers, X, OTHER, use_causal_mask=True)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_length_that_is_not_known(floatx, exchange):
    floatx("float64")
    models = []
    for layer in pair(2, exchange=exchange):
        x = keras.Input((None, FEATURES))
        models.append(keras.Model(x, layer(x, x, use_causal_mask=True)))
    for n in (1, 5, 9):
        compare.close(*(m(X[:, :n]) for m in models), f"length {n}", 1e-10, 1e-12)


def test_eager_attention_is_that_of_keras(floatx):
    floatx("float64")
    assert_equal(pair(3), X, use_causal_mask=True, traced=False)


def test_a_keras_mask_is_used_and_passed_on(floatx):
    floatx("float64")
    tokens = np.where(PADDING, 1 + np.arange(L) % 5, 0)
    outputs = []
    for layer in pair(2):
        x = inputs = keras.Input((L,), dtype="int32")
        x = keras.layers.Embedding(6, FEATURES, mask_zero=True)(x)
        y = layer(x, x, use_causal_mask=True)
        model = keras.Model(inputs, [y, keras.layers.GlobalAveragePooling1D()(y)])
        model.layers[1].set_weights([X[0, :6]])
        outputs.append(model(tokens))
    compare.assert_close(*outputs, 1e-10, 1e-12)


@pytest.mark.parametrize("masks", ["none", "causal", "pairs"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_same_attention_is_dropped(floatx, exchange, masks):
    floatx("float64")
    for few in (None, 2):
        layers = pair(2, few=few, exchange=exchange, dropout=0.4, seed=3)
        assert_equal(layers, X, training=True, what=masks, **MASKS[masks])
        assert_equal(layers, X, training=True, what="next step", **MASKS[masks])
        assert_equal(layers, X, what="evaluation", **MASKS[masks])


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_half_precision_drops_the_same(exchange):
    ones = {"dropout": 0.5, "seed": 3, "dtype": "mixed_bfloat16", "exchange": exchange}
    plain, parts = pair(2, x=X.astype("float32"), **ones)
    a, b = (
        keras.ops.cast(layer(X, X, training=True), "float32")
        for layer in (plain, parts)
    )
    assert np.abs(a - b).max() < 0.06 * np.abs(a).max()


def test_attention_in_half_precision_is_nearly_that_of_keras():
    plain, parts = pair(3, dtype="mixed_bfloat16", x=X.astype("float32"))
    a, b = (
        keras.ops.cast(layer(X, X, use_causal_mask=True), "float32")
        for layer in (plain, parts)
    )
    assert np.abs(a - b).max() < 0.06 * np.abs(a).max()


def scores_of(layer, length, **kwargs):
    """Returns for each device the sizes of the exponentials that it makes."""
    specs = tf.TensorSpec((1, length, FEATURES))
    traced = tf.function(lambda x: layer(x, x, **kwargs)).get_concrete_function(specs)
    sizes = {}
    for op in traced.graph.get_operations():
        if op.type in ("Exp", "Softmax") and op.outputs[0].shape[-1] != 1:
            sizes.setdefault(op.device, []).append(op.outputs[0].shape.num_elements())
    return sizes


@pytest.mark.parametrize(("exchange", "part"), [("ring", 16), ("all_to_all", 4)])
def test_a_device_has_a_part_of_the_scores(exchange, part):
    """In a ring a T-th of the queries and of the keys at a time, else of the heads."""
    x = np.zeros((1, 64, FEATURES), "float32")
    _, layer = pair(4, exchange=exchange, x=x)
    found = scores_of(layer, 64)
    assert len(found) == 4
    assert {max(sizes) for sizes in found.values()} == {4 * 64 * 64 // part}
    # What all blocks of a device take, which its backward reads.
    assert {sum(sizes) for sizes in found.values()} == {4 * 64 * 64 // 4}


def test_a_causal_ring_leaves_out_what_nobody_attends_to():
    """Of (2 T)^2 pairs of chunks those of a triangle, as many on each device."""
    _, layer = pair(4, x=np.zeros((1, 64, FEATURES), "float32"))
    found = scores_of(layer, 64, use_causal_mask=True)
    assert [len(sizes) for sizes in found.values()] == [9] * 4
    assert {size for sizes in found.values() for size in sizes} == {4 * 8 * 8}


@pytest.mark.parametrize("few", [None, 2])
def test_weights_in_files_are_those_of_keras(tmp_path, few):
    models = [
        keras.Model(x := keras.Input((L, FEATURES)), layer(x, x))
        for layer in pair(2, few=few)
    ]
    expected = models[0].get_weights()
    loaded = compare.reloaded(models[1], tmp_path)
    compare.assert_equal(expected, loaded.get_weights())
    assert loaded.layers[-1].exchange == "ring"
    names = [[w.path.split("/", 1)[1] for w in m.layers[-1].weights] for m in models]
    assert names[0] == names[1]


@pytest.mark.nightly
def test_a_pipeline_with_it_trains_as_the_plain_model(floatx):
    floatx("float64")

    def model(attention, **arguments):
        compare.fresh_names()
        x = inputs = keras.Input((L, FEATURES))
        y = keras.layers.LayerNormalization()(x)
        x = keras.layers.Add()([x, attention(y, y, use_causal_mask=True)])
        x = keras.layers.Dense(2, kernel_initializer="ones")(x)
        found = keras.Model(inputs, x)
        if arguments:
            found = tfgpipe.pipeline(found, **arguments)
        found.compile(keras.optimizers.Adam(0.01), "mse")
        return found

    plain, parts = pair(2)
    arguments = {"num_stages": 2, "num_microbatches": 2, "schedule": "1f1b"}
    models = [model(plain), model(parts, remat="auto", **arguments)]
    y = RNG.normal(size=(3, L, 2))
    for each in models:
        each.fit(X, y, batch_size=3, epochs=3, shuffle=False, verbose=0)
    compare.assert_close(*(m.get_weights() for m in models), 1e-9, 1e-11)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"num_heads": 3, "exchange": "all_to_all"}, "as many heads"),
        ({"num_heads": 4, "exchange": "broadcast"}, "exchange"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TPSequenceAttention(key_dim=3, num_shards=2, **arguments)
