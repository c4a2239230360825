"""What sharded layers refuse, in which words, and what they are as Keras layers."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfgpipe
from tests.tensor_parallel import identity
from tfgpipe.tensor_parallel import (
    TPMLP,
    OutputLoss,
    TPCrossEntropy,
    TPDense,
    TPEmbedding,
    TPLayerNormalization,
    TPMultiHeadAttention,
    full_weights,
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


def test_training_is_that_without_shards(floatx):
    floatx("float64")
    identity.assert_trains_equally("columns_and_rows", "both_ways", epochs=1)


def test_losses_are_weighted():
    losses, weights = np.array([1.0, 2.0]), np.array([1.0, 0.0])
    assert float(OutputLoss()(np.zeros(2), losses, sample_weight=weights)) == 0.5
