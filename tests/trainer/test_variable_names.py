"""Names of a run's variables say which they are, whatever encloses or numbers them."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tfgpipe_trainer import optimizers
from tfgpipe_trainer.checkpoint import variable_names

layers = keras.layers


def _stack() -> list[keras.layers.Layer]:
    return [
        layers.Dense(4, activation="relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.5),
        layers.Dense(4),
        layers.Dense(3, name="logits"),
    ]


def _model(num_stages: int, **optimizer: object) -> tfgpipe.PipelinedModel:
    model = tfgpipe.PipelinedModel(
        _stack(), num_stages=num_stages, num_microbatches=3, schedule="1f1b"
    )
    model(keras.Input([4]))
    model.compile(keras.optimizers.Adam(**optimizer), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_names_are_those_of_the_layers_in_any_cut() -> None:
    names = {num: list(variable_names.all_variables(_model(num))) for num in (1, 2, 3)}
    assert names[1] == names[2] == names[3]
    assert names[1][:4] == [
        "dense/kernel",
        "dense/bias",
        "batch_normalization/gamma",
        "batch_normalization/beta",
    ]
    assert "dense_1/kernel" in names[1]
    assert "logits/kernel" in names[1]
    assert "optimizer/logits/kernel/momentum" in names[1]
    assert any(name.startswith("seed_generator/") for name in names[1])
    assert not any("learning_rate" in name for name in names[1])


@pytest.mark.parametrize("functional", [False, True])
def test_names_are_those_of_the_plain_model(functional: bool) -> None:
    plain = keras.Sequential([keras.Input([4]), *_stack()])
    if functional:
        inputs = keras.Input([4])
        x = inputs
        for layer in _stack():
            x = layer(x)
        plain = keras.Model(inputs, x)
    assert (
        variable_names.weights(plain).keys() == variable_names.weights(_model(2)).keys()
    )


def test_every_variable_has_a_name_of_its_own() -> None:
    model = _model(2, use_ema=True, gradient_accumulation_steps=2)
    named = variable_names.all_variables(model)
    assert len({id(v) for v in named.values()}) == len(named)
    rate = [v for v in model.optimizer.variables if v.path.endswith("learning_rate")]
    expected = {id(v) for v in (*model.variables, *model.optimizer.variables)}
    assert {id(v) for v in named.values()} == expected - {id(v) for v in rate}


def test_names_of_a_model_inside_a_model() -> None:
    inner = keras.Sequential([layers.Dense(2), layers.Dense(2)], name="inner")
    model = keras.Sequential([keras.Input([2]), inner, layers.Dense(1)])
    names = list(variable_names.weights(model))
    assert len(set(names)) == 6
    assert names[-2:] == ["dense/kernel", "dense/bias"] or "inner" in names[0]


def test_averages_are_shown_and_taken_back_exactly() -> None:
    model = _model(2, use_ema=True, ema_momentum=0.5)
    x = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
    for _ in range(3):
        model.train_on_batch(x, x[:, :3])
    pairs = variable_names.averages(variable_names.all_variables(model))
    assert len(pairs) == len(model.trainable_variables)
    before = [keras.ops.convert_to_numpy(weight) for weight, _ in pairs]
    averages = [keras.ops.convert_to_numpy(average) for _, average in pairs]
    assert not np.array_equal(before[0], averages[0])
    with variable_names.ema_weights(model):
        for (weight, _), average in zip(pairs, averages, strict=True):
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(weight), average)
    for (weight, average), value, kept in zip(pairs, before, averages, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(weight), value)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(average), kept)


def test_copies_do_not_change_with_what_they_are_of() -> None:
    model = _model(2)
    copies = variable_names.snapshot(variable_names.all_variables(model))
    before = {name: value.numpy().copy() for name, value in copies.items()}
    x = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
    for _ in range(3):
        model.train_on_batch(x, x[:, :3])
    for name, value in copies.items():
        np.testing.assert_array_equal(value.numpy(), before[name], err_msg=name)
    after = variable_names.snapshot(variable_names.all_variables(model))
    assert not np.array_equal(after["dense/kernel"], before["dense/kernel"])


# The optimizer that leaves steps out.


@pytest.mark.parametrize("rule", ["AdamW", "SGD", "Adafactor", "Lion"])
def test_a_guarded_optimizer_is_the_optimizer_on_finite_gradients(rule: str) -> None:
    cls = getattr(keras.optimizers, rule)
    weights = [[keras.Variable(np.ones((2, 3))) for _ in range(2)] for _ in range(2)]
    both = [cls(0.1), optimizers.apply_if_finite(cls)(0.1)]
    gradient = np.random.default_rng(0).normal(size=(2, 3)).astype("float32")
    for optimizer, own in zip(both, weights, strict=True):
        optimizer.build(own)
        for scale in (1.0, -0.5):
            optimizer.apply([scale * keras.ops.array(gradient), None], own)
    compare.assert_equal(*weights)


def test_a_guarded_optimizer_leaves_out_what_is_not_finite() -> None:
    optimizer = optimizers.apply_if_finite(keras.optimizers.Adam)(0.1)
    own = [keras.Variable(np.ones(2, "float32")), keras.Variable(np.ones(1, "float32"))]
    optimizer.build(own)
    optimizer.apply([keras.ops.ones(2), keras.ops.ones(1)])
    before = [keras.ops.convert_to_numpy(v) for v in (*own, *optimizer.variables[:-2])]
    optimizer.apply([keras.ops.array([1.0, np.inf]), keras.ops.ones(1)])
    after = [keras.ops.convert_to_numpy(v) for v in (*own, *optimizer.variables[:-2])]
    compare.assert_equal(before, after)
    assert int(optimizer.num_skipped) == 1
    assert keras.ops.convert_to_numpy(optimizer.was_finite).tolist() == [False, True]
