"""Cross entropies in operations of their own are those of TensorFlow's kernel."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, joints
from tfgpipe.graph.passes import fusion
from tfgpipe.graph.passes.cross_entropy import fusible_cross_entropies
from tfgpipe.stage.joint import trace_joint

ROWS, CLASSES = 16, 2**14


def traced(labels, classes=CLASSES, rows=ROWS):
    return trace_joint(
        lambda inputs: {
            0: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, inputs[0])
        },
        input_specs=[tf.TensorSpec([rows, classes])],
        weights=[],
        state=[],
    )


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((ROWS, CLASSES)).astype("float32")
    return [logits, rng.standard_normal(ROWS).astype("float32")]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_losses_and_gradients(arrays, dtype):
    logits, _ = arrays
    logits[1] *= 1e4
    logits[2, 5:] = -np.inf
    logits[3] = 1e30
    labels = np.random.default_rng(1).integers(0, CLASSES, ROWS).astype(dtype)
    labels[:3] = 0, CLASSES - 1, 4
    plain = traced(labels)
    split = fusible_cross_entropies(plain)
    assert len(split.forms) == 2
    fused = fusion.fuse_chains(split, cache={})
    (gradient,) = fused.backward.input_grads
    assert fused.operation(gradient).type.endswith("PartitionedCall")
    expected = joints.run(plain, *arrays)
    for other in (split, fused):
        received = joints.run(other, *arrays)
        compare.assert_allclose(received, expected, rtol=2e-6, atol=1e-6)


def test_an_infinite_loss_stays_infinite(arrays):
    arrays[0][0, 7] = -np.inf
    plain = traced(np.full(ROWS, 7))
    expected = joints.run(plain, *arrays)
    received = joints.run(fusible_cross_entropies(plain), *arrays)
    assert np.isinf(expected[0][0])
    compare.assert_allclose(received, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_a_label_that_is_no_class_is_an_error(arrays, label):
    split = fusible_cross_entropies(traced(np.full(ROWS, label)))
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{label} is not in \[0"):
        joints.run(split, *arrays)


@pytest.mark.parametrize(("rows", "classes"), [(ROWS, 8), (None, CLASSES)])
def test_small_ones_and_those_of_unknown_size_stay(rows, classes):
    plain = traced(tf.zeros([ROWS], tf.int32), classes, rows)
    assert fusible_cross_entropies(plain) is plain


def test_a_pipeline_trains_as_the_plain_model():
    def layers():
        return [keras.layers.Dense(8, "relu"), keras.layers.Dense(CLASSES)]

    rng = np.random.default_rng(0)
    x = rng.standard_normal((4 * ROWS, 6)).astype("float32")
    y = rng.integers(0, CLASSES, 4 * ROWS)
    plain = keras.Sequential([keras.Input((6,)), *layers()])
    pipelined = tfgpipe.PipelinedModel(layers(), num_stages=2, num_microbatches=2)
    pipelined.build((None, 6))
    pipelined.set_weights(plain.get_weights())
    for model in (plain, pipelined):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
    histories = [
        model.fit(x, y, batch_size=2 * ROWS, epochs=2, shuffle=False, verbose=0)
        for model in (plain, pipelined)
    ]
    compare.assert_allclose(
        histories[1].history["loss"], histories[0].history["loss"], rtol=1e-6, atol=0
    )
    for a, b in zip(plain.get_weights(), pipelined.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def test_without_xla_for_cpus_it_stays(monkeypatch):
    monkeypatch.setattr(fusion, "has_xla", lambda: False)
    plain = traced(tf.zeros([ROWS], tf.int32))
    assert fusible_cross_entropies(plain) is plain
