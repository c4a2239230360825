"""Vocabularies in parts beside one table on one device, by Keras' own layers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tfgpipe.layers import SplitVocabulary
from tfgpipe.tensor_parallel import OutputLoss

V, D, L, N = 37, 8, 5, 12
RNG = np.random.default_rng(0)
TOKENS, TARGETS = (RNG.integers(0, V, (N, L)).astype("int32") for _ in range(2))
TABLE = RNG.normal(size=(V, D))


def blocks(x):
    """Returns what five blocks make of embeddings, with a residual path through all."""
    first = x
    for i in range(5):
        layer = keras.layers.Dense(D, activation="tanh", name=f"block_{i}")
        x = layer(x)
    return keras.layers.Add(name="residual")([first, x])


def plain(*, tied: bool) -> keras.Model:
    """Returns the model that Keras' layers make."""
    tokens = keras.Input((L,), dtype="int32")
    if tied:
        table = keras.layers.ReversibleEmbedding(V, D, name="table")
        y = table(blocks(table(tokens)), reverse=True)
    else:
        x = keras.layers.Embedding(V, D, name="rows")(tokens)
        y = keras.layers.Dense(V, name="head")(blocks(x))
    return keras.Model(tokens, y)


def split(P: int, *, tied: bool, **options) -> tuple[SplitVocabulary, keras.Model]:
    """Returns the same model with a head in parts, and its vocabulary."""
    tokens = keras.Input((L,), dtype="int32")
    targets = keras.Input((L,), dtype="int32")
    vocabulary = SplitVocabulary(V, D, num_parts=P, use_bias=not tied, **options)
    if tied:
        x = vocabulary.embed(tokens)
    else:
        x = keras.layers.Embedding(V, D, name="rows")(tokens)
    return vocabulary, keras.Model(
        [tokens, targets], vocabulary.cross_entropy(blocks(x), targets)
    )


def optimizer(*, tied: bool) -> keras.optimizers.Optimizer:
    """Returns Adam; not of Keras' rows, each of which it would square by itself."""
    if tied:
        return keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    return keras.optimizers.SGD(0.1, momentum=0.9)


def set_weights(model: keras.Model, vocabulary: SplitVocabulary | None = None) -> None:
    """Sets all weights, the same to a model with a vocabulary and to one without."""
    draw = np.random.default_rng(1)
    for i in range(5):
        for weight in model.get_layer(f"block_{i}").weights:
            weight.assign(draw.normal(size=weight.shape))
    for layer in model.layers:
        if layer.name in ("rows", "table"):
            layer.set_weights([TABLE])
        if layer.name == "head":
            layer.set_weights([TABLE.T, np.zeros(V)])
    if vocabulary is not None:
        vocabulary.table = TABLE


def weights(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns the weights, those of parts put together."""
    found = {}
    by_path = {v.path: v.numpy() for v in model.trainable_variables}
    for path, value in by_path.items():
        if path.startswith(("block", "rows")):
            found[path] = value
    tables = [v for k, v in by_path.items() if "vocabulary" in k and "embedd" in k]
    if tables:
        biases = [v for k, v in by_path.items() if "vocabulary" in k and "bias" in k]
        found["table"] = np.concatenate(tables)
        found |= {"bias": np.concatenate(biases)} if biases else {}
    elif "table/embeddings" in by_path:
        found["table"] = by_path["table/embeddings"]
    else:
        found["table"] = by_path["head/kernel"].T
        found["bias"] = by_path["head/bias"]
    return found


@pytest.mark.parametrize(
    ("P", "tied", "M", "schedule"),
    [(4, True, 6, "auto"), (2, False, 3, "auto"), (3, True, 3, "gpipe")],
)
def test_training_is_that_of_one_table(floatx, P, tied, M, schedule):
    floatx("float64")
    expected = plain(tied=tied)
    expected.compile(
        optimizer(tied=tied),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    set_weights(expected)
    compare.fresh_names()
    vocabulary, model = split(P, tied=tied)
    set_weights(model, vocabulary)
    stages = vocabulary.stages(model, devices=[f"CPU:{p}" for p in range(P)])
    stages["schedule"] = schedule
    assert len(stages["partition"]) == (3 if tied else 2) * P + 1
    pipelined = tfgpipe.pipeline(model, num_microbatches=M, **stages)
    pipelined.compile(optimizer(tied=tied), OutputLoss())
    # Unequal weights of positions, among them one that does not count.
    weight = np.linspace(0, 2, N * L).reshape(N, L)
    for _ in range(3):
        a = expected.train_on_batch(TOKENS, TARGETS, sample_weight=weight)
        b = pipelined.train_on_batch([TOKENS, TARGETS], TARGETS, sample_weight=weight)
        assert b == pytest.approx(a, rel=1e-12)
    want, got = weights(expected), weights(pipelined)
    assert want.keys() == got.keys()
    for name, value in want.items():
        compare.close(value, got[name], name, 1e-10, 1e-10)


def test_each_device_has_its_tokens():
    vocabulary, model = split(4, tied=True)
    stages = vocabulary.stages(model, devices=[f"CPU:{p}" for p in range(4)])
    pipelined = tfgpipe.pipeline(model, num_microbatches=3, **stages)
    pipelined.compile("adam", OutputLoss())
    pipelined.train_on_batch([TOKENS, TARGETS], TARGETS)
    where = {}
    for v in (*pipelined.variables, *pipelined.optimizer.variables):
        if "part" in v.path and v.shape:
            where.setdefault(v.value.device[-5:], []).append(v.shape[0])
    # The table and Adam's two slots.
    assert where == {f"CPU:{p}": [n] * 3 for p, n in enumerate((9, 9, 9, 10))}


def test_losses_and_gradients_of_large_logits():
    """Logits of 1e4, and a part whose logits are all far below the others'."""
    logits = tf.constant([[1e4, 9.99e3, -1e4, -1e4, 3.0, 1e4]])
    vocabulary = SplitVocabulary(6, 1, num_parts=3)
    x = keras.Input((1,))
    targets = keras.Input((), dtype="int32")
    model = keras.Model([x, targets], vocabulary.cross_entropy(x, targets))
    vocabulary.table = logits.numpy().T
    for target in range(6):
        want = tf.nn.sparse_softmax_cross_entropy_with_logits([target], logits)
        with tf.GradientTape() as tape:
            got = model([tf.ones((1, 1)), tf.constant([target])])
        np.testing.assert_allclose(got, want, rtol=1e-6)
        gradients = tape.gradient(got, [v.value for v in model.trainable_variables])
        softmax = tf.nn.softmax(logits).numpy()[0]
        softmax[target] -= 1
        np.testing.assert_allclose(np.concatenate(gradients)[:, 0], softmax, atol=1e-6)


def test_logits_are_those_of_the_parts_together():
    vocabulary = SplitVocabulary(V, D, num_parts=4)
    x = keras.Input((D,))
    model = keras.Model(x, vocabulary.logits(x))
    vocabulary.table = TABLE
    given = RNG.normal(size=(N, D)).astype("float32")
    np.testing.assert_allclose(model(given), given @ TABLE.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(vocabulary.table, TABLE, rtol=1e-6)


def test_losses_of_half_precision_are_in_single_precision():
    vocabulary, model = split(2, tied=True, dtype="mixed_bfloat16")
    assert model.output.dtype == "float32"
    assert vocabulary.parts[0].compute_dtype == "bfloat16"
    assert model([TOKENS, TARGETS]).dtype == tf.float32


def test_what_is_no_split_vocabulary_is_refused():
    vocabulary, model = split(2, tied=True)
    with pytest.raises(ValueError, match="Received 2 parts and 3 devices"):
        vocabulary.stages(model, devices=["CPU:0", "CPU:1", "CPU:2"])
    with pytest.raises(ValueError, match="Received the layers table, block_0"):
        vocabulary.stages(plain(tied=True), devices=["CPU:0", "CPU:1"])
    with pytest.raises(ValueError, match="num_parts"):
        SplitVocabulary(V, D, num_parts=1)
    with pytest.raises(ValueError, match="input_dim"):
        SplitVocabulary(3, D, num_parts=4)


def test_parts_draw_other_numbers_from_one_seed():
    tables = []
    for _ in range(2):
        initializer = keras.initializers.RandomUniform(seed=7)
        vocabulary = SplitVocabulary(
            16, D, num_parts=4, embeddings_initializer=initializer
        )
        vocabulary.embed(keras.Input((L,), dtype="int32"))
        tables.append(vocabulary.table)
    np.testing.assert_array_equal(*tables)
    assert len(np.unique(tables[0], axis=0)) == 16


def test_lengths_that_are_not_known_need_a_sample():
    tokens, targets = (keras.Input((None,), dtype="int32") for _ in range(2))
    vocabulary = SplitVocabulary(V, D, num_parts=2)
    x = blocks(vocabulary.embed(tokens))
    model = keras.Model([tokens, targets], vocabulary.cross_entropy(x, targets))
    devices = ["CPU:0", "CPU:1"]
    with pytest.raises(ValueError, match="sample"):
        vocabulary.stages(model, devices=devices)
    stages = vocabulary.stages(model, devices=devices, sample=[TOKENS, TARGETS])
    assert sum(stages["partition"]) == 2 + 7 + 3


def test_a_saved_model_has_its_parts(tmp_path):
    vocabulary, model = split(2, tied=True)
    set_weights(model, vocabulary)
    stages = vocabulary.stages(model, devices=["CPU:0", "CPU:1"])
    pipelined = tfgpipe.pipeline(model, num_microbatches=3, **stages)
    loaded = compare.reloaded(pipelined, tmp_path)
    expected = model([TOKENS, TARGETS])
    np.testing.assert_allclose(loaded([TOKENS, TARGETS]), expected, rtol=1e-5)
