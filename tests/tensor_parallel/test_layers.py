"""What sharded layers refuse, in which words, and what they are as Keras layers."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.marks import nightly
from tests.tensor_parallel import identity
from tests.tensor_parallel.models import WAYS
from tfgpipe._compat import keras_internals
from tfgpipe.tensor_parallel import (
    TPMLP,
    OutputLoss,
    TPCrossEntropy,
    TPDense,
    TPEmbedding,
    TPLayerNormalization,
    TPMultiHeadAttention,
    full_weights,
    set_full_weights,
)

REFUSED = {
    "units": (
        lambda: TPDense(10, num_shards=4),
        r"10 units and num_shards=4 .* nearest numbers of units are 8 and 12",
    ),
    "few units": (lambda: TPDense(2, num_shards=4), r"nearest numbers .* are 4;"),
    "rows": (
        lambda: TPDense(8, partition="row", num_shards=4).build((None, 6)),
        r"6 input features and num_shards=4",
    ),
    "hidden units": (lambda: TPMLP(6, units=3, num_shards=4), r"6 units and"),
    "heads": (
        lambda: TPMultiHeadAttention(6, key_dim=2, num_shards=4),
        r"6 heads and num_shards=4 .* nearest numbers of heads are 4 and 8",
    ),
    "features": (
        lambda: TPLayerNormalization(num_shards=4).build((None, 6)),
        r"6 features and num_shards=4",
    ),
    "devices": (
        lambda: TPDense(18, num_shards=9),
        r"num_shards=9 and 8 devices: .*`tfgpipe.make_logical_cpus\(9\)`",
    ),
    "named devices": (
        lambda: TPDense(18, num_shards=3, devices=["CPU:0", "CPU:1"]),
        r"num_shards=3 and 2 devices: CPU:0, CPU:1",
    ),
    "unknown devices": (
        lambda: TPDense(18, devices=["CPU:0", "CPU:99"]),
        r"Received CPU:99; TensorFlow sees",
    ),
    "no shards": (lambda: TPDense(4, num_shards=0), r"at least 1, or None .* 0"),
    "no units": (lambda: TPDense(0, num_shards=2), "`units` must be .* Received 0"),
    "no keys": (
        lambda: TPMultiHeadAttention(2, key_dim=-1, num_shards=2),
        "`key_dim` must be an integer of at least 1. Received -1",
    ),
    "no values": (
        lambda: TPMultiHeadAttention(2, key_dim=1, value_dim=0, num_shards=2),
        "`value_dim` must be an integer of at least 1. Received 0",
    ),
    "no vocabulary": (lambda: TPEmbedding(0, 4, num_shards=2), "`input_dim` must be"),
    "collective": (
        lambda: TPDense(4, num_shards=2, collective="sync"),
        r"`collective` must be one of 'gather', 'ring', .*. Received 'sync'",
    ),
    "partition": (
        lambda: TPDense(4, num_shards=2, partition="columns"),
        r"`partition` must be one of 'column', 'row'. Received 'columns'",
    ),
    "softmax of parts": (
        lambda: TPDense(4, num_shards=2, activation="softmax", gather_output=False),
        r"activation='softmax', which may look at all units",
    ),
    "no sequence": (
        lambda: TPMultiHeadAttention(2, key_dim=2, num_shards=2).build(
            (None, 3, 4, 5), (None, 3, 4, 5)
        ),
        r"\(None, 3, 4, 5\). Reshape it to one axis of positions",
    ),
    "full logits": (
        lambda: TPCrossEntropy(num_shards=2).build((None, 10), (None,)),
        r"a tuple of one part for each shard.*Received the shape \(None, 10\)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_said(what):
    make, words = REFUSED[what]
    with pytest.raises(ValueError, match=words):
        make()


def test_all_devices_are_used_unless_said_otherwise():
    assert TPDense(8).num_shards == 8
    assert TPDense(8, devices=["CPU:1", "CPU:2"]).num_shards == 2


@pytest.mark.parametrize(
    "layer",
    [
        lambda: TPDense(
            8, partition="row", collective="bidirectional_ring", num_shards=2
        ),
        lambda: TPDense(8, devices=["CPU:2", "CPU:3"], gather_output=False),
        lambda: TPMLP(8, units=3, activation="relu", dropout=0.1, seed=4, num_shards=2),
        lambda: TPMultiHeadAttention(4, key_dim=2, value_dim=3, seed=1, num_shards=2),
        lambda: TPEmbedding(10, 4, mask_zero=True, num_shards=3),
        lambda: TPLayerNormalization(epsilon=1e-5, center=False, num_shards=2),
        lambda: TPCrossEntropy(num_shards=2),
    ],
)
def test_a_configuration_makes_the_layer_again(layer):
    made = layer()
    again = type(made).from_config(made.get_config())
    assert again.get_config() == made.get_config()


def test_a_users_activation_sees_all_units():
    layer = TPDense(
        6, num_shards=3, activation=lambda y: y / keras.ops.sum(y, -1)[:, None]
    )
    dense = keras.layers.Dense(6, activation=layer.activation)
    x = np.ones((2, 4), "float32")
    dense.build(x.shape), layer.build(x.shape)
    tfgpipe.tensor_parallel.set_full_weights(layer, dense.get_weights())
    np.testing.assert_allclose(layer(x), dense(x), rtol=1e-5)


@pytest.mark.parametrize(("center", "scale"), [(False, True), (True, False)])
def test_normalization_without_an_offset_or_a_scale_is_that_of_keras(center, scale):
    rng = np.random.default_rng(0)
    x, target = rng.normal(size=(2, 3, 6))
    weight = rng.normal(size=6)
    found = []
    for kind, arguments in (
        (keras.layers.LayerNormalization, {}),
        (TPLayerNormalization, {"num_shards": 3}),
    ):
        layer = kind(epsilon=0.1, center=center, scale=scale, **arguments)
        layer.build((None, 6))
        if arguments:
            set_full_weights(layer, [weight])
        else:
            layer.set_weights([weight])
        given = tf.constant(x, tf.float32)
        with tf.GradientTape() as tape:
            tape.watch(given)
            y = layer(given)
            loss = tf.reduce_sum(tf.square(y - target))
        own = [v.value for v in layer.trainable_variables]
        of_input, *gradients = tape.gradient(loss, [given, *own])
        found.append((y, of_input, tf.concat(gradients, 0)))
    compare.assert_allclose(*found[::-1], rtol=1e-5, atol=1e-5)


def test_padding_is_neither_read_nor_trained():
    embedding = TPEmbedding(5, 3, num_shards=4)  # 2, 2, 1 and 0 tokens.
    tokens, targets = (keras.Input((4,), dtype="int32") for _ in range(2))
    model = keras.Model([tokens, targets], embedding(embedding(tokens), targets))
    model.compile(keras.optimizers.Adam(0.1), OutputLoss())
    x = np.array([[0, 1, 2, 3], [4, 4, 3, 0]])
    model.fit([x, x], x, epochs=2, verbose=0)
    table = np.concatenate([part.numpy() for part in embedding.table])
    assert table.shape == (8, 3)
    assert not table[5:].any()
    assert full_weights(model)[0].shape == (5, 3)


def test_tokens_outside_the_vocabulary_give_zeros():
    embedding = TPEmbedding(5, 3, num_shards=2)
    found = embedding(np.array([4, 5, -1]))
    assert np.any(found[0])
    assert not np.any(found[1:])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "ways", "epochs"),
    nightly(
        itertools.product(["columns_and_rows", "classifier"], WAYS, [2]),
        gate=[("columns_and_rows", "both_ways", 1)],
    ),
)
def test_training_is_that_without_shards(floatx, case, ways, epochs):
    floatx("float64")
    identity.assert_trains_equally(case, ways, epochs=epochs)


@pytest.mark.parametrize("shard", range(3))
def test_logits_of_any_shard_may_be_large(shard):
    """Exponentials of them would overflow."""
    logits = np.random.default_rng(0).normal(size=(4, 12)).astype("float32")
    logits[:, 4 * shard : 4 * shard + 2] += 200.0
    targets = np.array([0, 4, 8, 11])
    expected = keras.losses.sparse_categorical_crossentropy(
        targets, logits, from_logits=True
    )
    parts = tuple(tf.constant(part) for part in np.split(logits, 3, axis=-1))
    received = TPCrossEntropy(num_shards=3)(parts, tf.constant(targets))
    np.testing.assert_allclose(received, expected, rtol=1e-5)


def test_losses_are_weighted():
    losses, weights = np.array([1.0, 2.0]), np.array([1.0, 0.0])
    assert float(OutputLoss()(np.zeros(2), losses, sample_weight=weights)) == 0.5


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("masked", ["query", "both", "argument", "value"])
def test_masks_count_as_in_keras_attention(masked, dropout):
    """At queries that a mask leaves no key as well, and for who reads them next."""
    x = np.random.default_rng(0).normal(size=(3, 5, 6)).astype("float32")
    mask = tf.constant(np.arange(5) < np.array([[5], [3], [2]]))
    plain = keras.layers.MultiHeadAttention(2, 4, dropout=dropout)
    sharded = TPMultiHeadAttention(2, key_dim=4, dropout=dropout, num_shards=2)
    plain(x, x), sharded(x, x)
    full = [keras.random.normal(w.shape) for w in plain.weights[:8]]
    plain.set_weights([*full, *plain.get_weights()[8:]])
    set_full_weights(sharded, [*full, *full_weights(sharded)[8:]])

    def attend(layer):
        query, value = tf.constant(x), tf.constant(x)
        if masked in ("query", "both"):
            keras_internals.calls.set_mask(query, mask)
        if masked in ("value", "both"):
            keras_internals.calls.set_mask(value, mask & False)
        arguments = {"query_mask": mask} if masked == "argument" else {}
        y = layer(query, value, **arguments)
        return y, [keras_internals.calls.get_mask(t) for t in (y, query, value)]

    (expected, masks), (received, own) = attend(plain), attend(sharded)
    compare.close(expected, received, "outputs", 1e-5, 2e-6)
    assert [m is None for m in own] == [m is None for m in masks]
