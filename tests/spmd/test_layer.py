"""An SPMD pipeline on one device gives what plain Keras gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.transformer_blocks import (
    Block,
    data,
    model,
    pair,
    pipeline_of,
    values,
)


def _assert_equal(received: Any, expected: Any, tolerance: float = 1e-12) -> None:
    compare.assert_allclose(received, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("num_stages", "num_layers", "num_microbatches"),
    [(1, 2, 2), (2, 4, 4), (3, 3, 2)],
)
def test_training_is_that_of_the_plain_model(
    floatx: Callable[[str], None],
    num_stages: int,
    num_layers: int,
    num_microbatches: int,
) -> None:
    floatx("float64")
    plain, pipelined = pair(
        Block,
        num_layers=num_layers,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        # Without a small epsilon Adam turns gradients of nothing but rounding into
        # steps.
        optimizer=lambda: keras.optimizers.AdamW(0.01, epsilon=1e-3),
    )
    _assert_equal(values(pipelined), values(plain), 0.0)
    x, y = data(16)
    histories = [
        m.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        for m in (plain, pipelined)
    ]
    assert histories[0].keys() == histories[1].keys()
    _assert_equal(histories[1]["loss"], histories[0]["loss"])
    assert histories[0]["loss"][1] < histories[0]["loss"][0]
    _assert_equal(values(pipelined), values(plain))
    _assert_equal(pipelined.predict(x, verbose=0), plain.predict(x, verbose=0))


def test_gradients_of_inputs_and_weights_are_those_of_the_plain_layers(
    floatx: Callable[[str], None],
) -> None:
    floatx("float64")
    layers = [Block() for _ in range(4)]
    pipelined = tfgpipe.SPMDPipeline(layers, num_stages=2, num_microbatches=3)
    x = tf.constant(np.random.default_rng(0).standard_normal((6, 5, 8)))
    pipelined.build(x.shape)
    weights = [v for layer in layers for v in layer.trainable_variables]

    def plain(x: tf.Tensor) -> tf.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    def gradients(call: Callable, variables: list) -> list:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.sin(call(x)))
        return [y, *tape.gradient(y, [x, *(v.value for v in variables)])]

    y, dx, *expected = gradients(plain, weights)
    per_layer = len(expected) // 4
    # Two layers a stage: those of layer 0 with those of layer 2.
    stacked = [
        np.stack([expected[i], expected[i + 2 * per_layer]])
        for i in range(2 * per_layer)
    ]
    for wrap in (lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True)):
        run = wrap(lambda: gradients(pipelined, pipelined.trainable_variables))
        _assert_equal(run(), [y, dx, *stacked], 1e-10)


def test_with_one_microbatch_dropout_draws_the_masks_of_the_plain_model(
    floatx: Callable[[str], None],
) -> None:
    floatx("float64")
    plain, pipelined = pair(
        lambda: Block(dropout=0.5), num_layers=4, num_stages=2, num_microbatches=1
    )
    x, y = data(8)
    for _ in range(2):
        losses = [m.train_on_batch(x, y)[0] for m in (plain, pipelined)]
        _assert_equal([losses[1]], [losses[0]])


def test_microbatches_draw_different_masks_and_advance_the_seeds() -> None:
    x = np.ones((4, 1000), "float32")
    layers = [keras.layers.Dropout(0.5, seed=i) for i in range(2)]
    pipelined = tfgpipe.SPMDPipeline(layers, num_stages=2, num_microbatches=4)
    before = None
    for _ in range(2):
        y = np.asarray(pipelined(x, training=True))
        assert len({row.tobytes() for row in y}) == 4
        assert before is None or not np.array_equal(before, y)
        before = y
    assert [v.shape for v in pipelined.variables] == [(2, 2)]
    np.testing.assert_array_equal(np.asarray(pipelined.variables[0])[:, 1], [8, 8])
    np.testing.assert_array_equal(pipelined(x), x)


def test_statistics_move_once_for_each_microbatch() -> None:
    x = np.random.default_rng(0).standard_normal((6, 3)).astype("float32")
    pipelined = tfgpipe.SPMDPipeline(
        [keras.layers.BatchNormalization(momentum=0.5) for _ in range(2)],
        num_stages=2,
        num_microbatches=3,
    )
    plain = [keras.layers.BatchNormalization(momentum=0.5) for _ in range(2)]
    expected = []
    for microbatch in np.split(x, 3):
        for layer in plain:
            microbatch = layer(microbatch, training=True)
        expected.append(microbatch)
    received = pipelined(x, training=True)
    np.testing.assert_allclose(received, np.concatenate(expected), atol=1e-5)
    for layer, own in zip(pipelined.unstack(), plain, strict=True):
        compare.assert_allclose(layer.variables, own.variables, atol=1e-6)


def test_frozen_layers_stay_as_they_are_and_trained_ones_are_given() -> None:
    layers = [Block() for _ in range(2)]
    for layer in layers:
        layer.build((None, 6, 8))
        layer.inner.trainable = False
    frozen = np.asarray(layers[1].inner.kernel)
    trained = model(layers, num_stages=2, num_microbatches=2)
    kernel = np.asarray(layers[1].outer.kernel)
    trained.fit(*data(8), verbose=0)
    pipeline_of(trained).unstack()
    np.testing.assert_array_equal(layers[1].inner.kernel, frozen)
    assert not np.array_equal(layers[1].outer.kernel, kernel)


def test_penalties_of_weights_are_those_of_the_plain_model() -> None:
    plain, pipelined = pair(
        lambda: Block(regularizer="l2"),
        num_layers=2,
        num_stages=2,
        num_microbatches=2,
    )
    x, y = data(4)
    losses = [m.train_on_batch(x, y)[0] for m in (plain, pipelined)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_tensors_between_stages_have_the_compute_dtype(policy: str) -> None:
    layers = [keras.layers.Dense(4, dtype=policy) for _ in range(2)]
    pipelined = tfgpipe.SPMDPipeline(layers, num_stages=2, num_microbatches=2)
    y = pipelined(np.ones((4, 4), "float32"))
    assert keras.backend.standardize_dtype(y.dtype) == policy.removeprefix("mixed_")
    assert {v.dtype for v in pipelined.weights} == {"float32"}
    plain = layers[1](layers[0](np.ones((4, 4), "float32")))
    np.testing.assert_array_equal(tf.cast(y, "float32"), tf.cast(plain, "float32"))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: keras.optimizers.Adafactor(), "Adafactor"),
        (lambda: keras.optimizers.Adam(clipnorm=1.0), "clipnorm=1.0"),
    ],
)
def test_an_optimizer_that_takes_norms_of_weights_is_warned_of(
    make: Callable[[], keras.optimizers.Optimizer], what: str
) -> None:
    trained = model(
        [Block() for _ in range(2)],
        num_stages=2,
        num_microbatches=2,
        optimizer=make(),
    )
    with pytest.warns(UserWarning, match=f"weights of all stages .*{what}"):
        trained.train_step(data(4))


def test_a_model_is_saved_and_loaded(tmp_path: Path) -> None:
    saved = model([Block() for _ in range(2)], num_stages=2, num_microbatches=2)
    x, y = data(8)
    saved.fit(x, y, verbose=0)
    saved.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", {"Block": Block})
    assert pipeline_of(loaded).get_config()["num_stages"] == 2
    np.testing.assert_array_equal(
        loaded.predict(x, verbose=0), saved.predict(x, verbose=0)
    )


def test_weights_are_named_after_those_of_the_first_stage() -> None:
    layers = [keras.layers.Dense(4, name=f"dense_{i}") for i in range(4)]
    pipelined = tfgpipe.SPMDPipeline(layers, num_stages=2, num_microbatches=1)
    pipelined.build((None, 4))
    assert [v.name for v in pipelined.weights] == [
        "layer0_kernel",
        "layer0_bias",
        "layer1_kernel",
        "layer1_bias",
    ]
    assert pipelined.weights[0].shape == (2, 4, 4)


class _Unknown(keras.layers.Layer):
    def call(self, x):
        return x


class _Clips(keras.layers.Dense):
    config_is_complete = True

    def call(self, x):
        self.kernel.assign(keras.ops.clip(self.kernel, -1.0, 1.0))
        return super().call(x)


class _AddsLoss(keras.layers.Layer):
    config_is_complete = True

    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x


def _dense(units: int = 4, **arguments: Any) -> keras.layers.Layer:
    return keras.layers.Dense(units, **arguments)


_ALIKE = "compute the same"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [_dense(activation="relu"), _dense()], f"{_ALIKE}.*differs"),
        (lambda: [_dense(), _dense(use_bias=False)], f"{_ALIKE}.*differs"),
        (lambda: [_Unknown(), _Unknown()], f"{_ALIKE}.*config_is_complete"),
        (lambda: [_dense(5), _dense(5)], r"shape and dtype.*\(2, 5\)"),
        (lambda: [_dense() for _ in range(3)], "3 layers for 2 stages"),
        (lambda: [_dense()] * 2, "a layer twice"),
        (lambda: [_AddsLoss(), _AddsLoss()], "add a loss"),
        (lambda: [_Clips(4), _Clips(4)], "assigns '.*kernel'"),
        (lambda: [_dense(bias_constraint="non_neg") for _ in range(2)], "constraint"),
        (
            lambda: [
                _dense(kernel_regularizer=keras.regularizers.OrthogonalRegularizer())
                for _ in range(2)
            ],
            "Use L1, L2 or L1L2",
        ),
    ],
)
def test_stages_that_cannot_be_stacked_are_refused(
    make: Callable[[], list], message: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        tfgpipe.SPMDPipeline(make(), num_stages=2, num_microbatches=1)(np.ones((2, 4)))


def test_what_is_no_layer_is_refused() -> None:
    with pytest.raises(TypeError, match="must be Keras layers"):
        tfgpipe.SPMDPipeline([len, len], num_stages=2, num_microbatches=1)


def test_batches_that_microbatches_do_not_divide_and_masks_are_refused() -> None:
    layers = [_dense(), _dense()]
    pipelined = tfgpipe.SPMDPipeline(layers, num_stages=2, num_microbatches=4)
    with pytest.raises(ValueError, match=r"6 examples for num_microbatches=4"):
        pipelined(np.ones((6, 4), "float32"))
    with pytest.raises(ValueError, match="received int32"):
        pipelined(np.ones((4, 4), "int32"))
    embedding = keras.layers.Embedding(5, 4, mask_zero=True)
    with pytest.raises(ValueError, match="received inputs with a mask"):
        pipelined(embedding(np.ones((4, 3), "int32")))


def test_unstacking_needs_weights() -> None:
    pipelined = tfgpipe.SPMDPipeline([_dense()], num_stages=1, num_microbatches=1)
    with pytest.raises(RuntimeError, match="no weights before it is built"):
        pipelined.unstack()


def test_a_strategy_of_other_pipelines_is_refused() -> None:
    strategy = tfgpipe.PipelineStrategy(num_stages=2)
    with strategy.scope(), pytest.raises(ValueError, match="SPMDPipelineStrategy"):
        tfgpipe.SPMDPipeline([_dense(), _dense()], num_stages=2, num_microbatches=1)(
            np.ones((2, 4), "float32")
        )
