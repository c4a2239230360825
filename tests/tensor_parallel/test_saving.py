"""Files of sharded layers are those of the layers without shards."""

from __future__ import annotations

import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import compare, pairwise
from tests.tensor_parallel.models import CASES, CASES_IN_FILES
from tfgpipe.tensor_parallel import (
    TPMLP,
    TPDense,
    TPMultiHeadAttention,
    full_weights,
    set_full_weights,
)


@pytest.mark.parametrize(
    ("case", "before", "after"),
    pairwise.all_pairs(
        {"case": CASES_IN_FILES, "before": [None, 4], "after": [None, 1, 3]}
    ),
)
def test_weights_load_with_any_number_of_shards(tmp_path, case, before, after):
    path = tmp_path / "model.weights.h5"
    plain, sharded = CASES[case].pair(4)
    (plain if before is None else sharded).save_weights(path)
    compare.fresh_names()
    model = CASES[case].make(after)
    model.load_weights(path)
    compare.assert_equal(plain.get_weights(), full_weights(model))


def test_an_mlp_loads_with_any_number_of_shards(tmp_path):
    path = tmp_path / "model.weights.h5"
    plain, sharded = CASES["mlp"].pair(4)
    sharded.save_weights(path)
    compare.fresh_names()
    model = CASES["mlp"].make(1)
    model.load_weights(path)
    compare.assert_equal(plain.get_weights(), full_weights(model))


@pytest.mark.parametrize("case", [*CASES_IN_FILES, "mlp"])
def test_a_model_file_makes_the_model_again(tmp_path, case):
    _, sharded = CASES[case].pair(4, collective="bidirectional_ring")
    loaded = compare.reloaded(sharded, tmp_path)
    for a, b in zip(sharded.layers, loaded.layers, strict=True):
        assert type(a) is type(b)
        assert a.get_config() == b.get_config()
    x = CASES[case].data(3)
    a, b = (keras.tree.flatten(model(x)) for model in (sharded, loaded))
    compare.assert_equal(a, b)


@pytest.mark.parametrize(
    ("mode", "ring", "collective"),
    [
        ("sync", "one_way", "gather"),
        ("ring", "one_way", "ring"),
        ("ring", "both_ways", "bidirectional_ring"),
    ],
)
def test_configurations_before_version_0_2_load(mode, ring, collective):
    for layer in (
        TPDense(4, num_shards=2),
        TPMLP(4, units=3, num_shards=2),
        TPMultiHeadAttention(2, key_dim=3, num_shards=2),
    ):
        config = layer.get_config()
        del config["collective"]
        made = type(layer).from_config({**config, "mode": mode, "ring": ring})
        assert made.get_config() == {**config, "collective": collective}


def test_classes_are_named_like_those_that_their_files_are_of():
    for kind, plain in (
        (TPDense, keras.layers.Dense),
        (TPMultiHeadAttention, keras.layers.MultiHeadAttention),
    ):
        assert kind.__name__ == kind.__qualname__ == plain.__name__
        assert pickle.loads(pickle.dumps(kind)) is kind


def test_a_checkpoint_restores_weights_and_slots(tmp_path):
    x, y = np.ones((4, 12), "float32"), np.ones((4, 12), "float32")
    _, model = CASES["columns_and_rows"].pair(4)
    model.compile("adam", "mse", run_eagerly=True)
    model.train_on_batch(x, y)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    again = CASES["columns_and_rows"].make(4)
    again.compile("adam", "mse")
    again.optimizer.build(again.trainable_variables)
    restored = tf.train.Checkpoint(model=again, optimizer=again.optimizer).read(path)
    restored.assert_existing_objects_matched()
    compare.assert_equal(
        [*model.variables, *model.optimizer.variables],
        [*again.variables, *again.optimizer.variables],
    )


def test_weights_of_plain_layers_can_be_set_and_taken():
    dense = keras.layers.Dense(6)
    dense.build((None, 4))
    layer = TPDense(6, num_shards=3)
    layer.build((None, 4))
    set_full_weights(layer, dense.get_weights())
    compare.assert_equal(dense.get_weights(), full_weights(layer))
    with pytest.raises(ValueError, match=r"has 2 full weights\. Received 1\."):
        set_full_weights(layer, dense.get_weights()[:1])
    with pytest.raises(ValueError, match=r"'kernel' .* full shape \(4, 6\)\. Received"):
        set_full_weights(layer, [np.ones((5, 6)), np.ones(6)])


def test_a_file_of_another_layer_is_refused(tmp_path):
    path = tmp_path / "model.weights.h5"
    sharded = TPDense(4, num_shards=2, use_bias=False)
    keras.Sequential([keras.Input((3,)), sharded]).save_weights(path)
    other = keras.Sequential([keras.Input((3,)), TPDense(4, num_shards=2)])
    with pytest.raises(
        ValueError, match=r"has 2 full weights\. Received a file with 1"
    ):
        other.load_weights(path)
