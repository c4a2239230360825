"""The contract of losses and metrics of Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.versions import MOVED
from tfgpipe._compat import keras_internals

X, Y = tf.ones((4, 2)), tf.zeros((4, 3))


def two_outputs():
    inputs = keras.Input((2,))
    outputs = [keras.layers.Dense(3, name=name)(inputs) for name in "ab"]
    return keras.Model(inputs, outputs)


def compiled_model(**arguments):
    model = two_outputs()
    arguments = {"loss": ["mse", "mae"], "loss_weights": [2.0, 0.5], **arguments}
    model.compile("sgd", **arguments)
    keras_internals.compiled.build_compiled(model, (X, [Y, Y]))
    return model


def test_what_a_model_was_compiled_with_is_found():
    model = two_outputs()
    model.compile(
        "sgd", ["mse", "mae"], metrics=[["mse"], []], weighted_metrics=[[], ["mae"]]
    )
    found = keras_internals.compiled.compiled(model)
    assert isinstance(found, keras_internals.compiled.CompiledState)
    assert isinstance(found.losses, keras.losses.Loss), MOVED
    assert isinstance(found.metrics, keras.metrics.Metric), MOVED
    assert found.tracker is model.metrics[0], MOVED
    assert found.tracker.name == "loss", MOVED
    keras_internals.compiled.build_compiled(model, (X, [Y, Y]))
    assert found.num_losses == 2, MOVED
    assert [tracker.name for tracker in found.loss_trackers] == ["a_loss", "b_loss"]
    ids = {id(variable) for variable in model.metrics_variables}
    assert len(found.variables) == 4, MOVED
    assert {id(variable) for variable in found.variables} < ids, MOVED


def test_a_model_without_losses_and_metrics_has_none():
    model = two_outputs()
    model.compile("sgd")
    found = keras_internals.compiled.compiled(model)
    assert (found.losses, found.metrics) == (None, None), MOVED
    assert (found.num_losses, found.loss_trackers, found.variables) == (0, [], [])
    assert keras_internals.compiled.evaluate_loss(found, None, Y, Y, None) == (
        None,
        [],
    ), MOVED
    assert keras_internals.compiled.metric_terms(found, Y, Y, None) == [], MOVED


@pytest.mark.parametrize("in_graph", [False, True])
def test_all_that_is_compiled_is_built_before_any_step(in_graph):
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile("adam", "mse", metrics=["mae"])

    @tf.function
    def build(x, y):
        keras_internals.compiled.build_compiled(model, (x, y))

    build(X, Y) if in_graph else keras_internals.compiled.build_compiled(model, (X, Y))
    assert model.built, MOVED
    assert model.optimizer.built, MOVED
    assert len(keras_internals.compiled.compiled(model).variables) == 2, MOVED
    model.train_on_batch(X, Y)


def test_what_compiles_another_model_alike():
    loss, metric = keras.losses.Huber(), keras.metrics.MeanSquaredError()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD()
    model.compile(
        optimizer,
        loss,
        loss_weights=[0.5],
        metrics=[metric],
        weighted_metrics=["mae"],
        run_eagerly=True,
        steps_per_execution=3,
    )
    found = keras_internals.compiled.compile_arguments(model)
    assert found["optimizer"] is optimizer, MOVED
    assert found["loss"] is loss, MOVED
    assert found["metrics"] == [metric], MOVED
    given = {"loss_weights": [0.5], "weighted_metrics": ["mae"], "run_eagerly": True}
    assert given.items() < {k: found[k] for k in found if k != "loss"}.items(), MOVED
    assert found["steps_per_execution"] == 3, MOVED
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    other.compile(**found)
    assert other.optimizer is optimizer


@pytest.mark.usefixtures("mixed_precision")
def test_an_optimizer_that_scales_the_loss_is_handed_on_as_it_is():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    found = keras_internals.compiled.compile_arguments(model)
    assert isinstance(found["optimizer"], keras.optimizers.LossScaleOptimizer), MOVED
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    other.compile(**found)
    assert other.optimizer is model.optimizer


def test_losses_by_themselves_are_as_in_a_compiled_model():
    shapes = {name: keras.KerasTensor((None, 3)) for name in ("a", "b")}
    losses = {"a": keras.losses.MeanSquaredError(), "b": keras.losses.Huber()}
    found = keras_internals.compiled.state_of_losses(losses, shapes, shapes)
    assert found.num_losses == 2, MOVED
    seen = {}

    def evaluate(i, loss, target, output, weight):
        seen[loss.name] = target, output, weight
        return tf.constant(1.0 + i)

    values = {name: tf.ones((4, 3)) for name in ("a", "b")}
    total, _ = keras_internals.compiled.evaluate_loss(
        found, evaluate, values, values, None
    )
    assert float(total) == 3.0, MOVED
    assert seen["huber_loss"][0] is values["b"], MOVED
    assert found.compiled_metrics == [], MOVED


def test_losses_are_evaluated_anew_with_what_keras_gives_them():
    model = compiled_model()
    found = keras_internals.compiled.compiled(model)
    seen = []

    def evaluate(i, loss, target, output, weight):
        seen.append((i, loss.name, target, output, weight))
        return tf.constant(10.0 + i)

    outputs, weights = [tf.ones((4, 3)), tf.ones((4, 3))], [tf.ones(4), tf.zeros(4)]
    targets = {"b": Y, "a": Y + 1.0}
    total, each = keras_internals.compiled.evaluate_loss(
        found, evaluate, targets, outputs, weights
    )
    assert [entry[:2] for entry in seen] == [(0, "mse"), (1, "mae")], MOVED
    assert [float(entry[2][0, 0]) for entry in seen] == [1.0, 0.0], MOVED
    for entry, output, weight in zip(seen, outputs, weights, strict=True):
        assert entry[3] is output, MOVED
        assert entry[4] is weight, MOVED
    assert float(total) == 2.0 * 10.0 + 0.5 * 11.0, MOVED
    assert [float(value) for value in each] == [10.0, 11.0], MOVED


def test_losses_are_those_of_keras_again_afterwards():
    model = compiled_model()
    found = keras_internals.compiled.compiled(model)

    def fails(*_):
        raise ArithmeticError

    outputs = [tf.ones((4, 3)), tf.ones((4, 3))]
    with pytest.raises(ArithmeticError):
        keras_internals.compiled.evaluate_loss(found, fails, [Y, Y], outputs, None)
    assert not any(np.any(v) for m in found.loss_trackers for v in m.variables)
    assert float(found.losses([Y, Y], outputs)) == 2.5, MOVED
    assert [float(m.result()) for m in found.loss_trackers] == [1.0, 1.0], MOVED


def test_metrics_come_with_what_keras_updates_them_with():
    model = compiled_model(
        metrics={"b": ["mse"]}, weighted_metrics={"a": ["mae", "mse"], "b": ["mae"]}
    )
    outputs = {"a": tf.ones((4, 3)), "b": tf.ones((4, 3)) * 2.0}
    targets, weights = {"b": Y + 1.0, "a": Y}, {"a": tf.ones(4), "b": tf.zeros(4)}
    # As the model returns them, in a list.
    given = (targets, [*outputs.values()], weights)
    terms = keras_internals.compiled.metric_terms(
        keras_internals.compiled.compiled(model), *given
    )
    found = [
        (
            term.metric.name,
            float(term.target[0, 0]),
            float(term.output[0, 0]),
            None if term.weight is None else float(term.weight[0]),
        )
        for term in terms
    ]
    assert found == [
        ("mse", 1.0, 2.0, None),
        ("mae", 0.0, 1.0, 1.0),
        ("mse", 0.0, 1.0, 1.0),
        ("mae", 1.0, 2.0, 0.0),
    ], MOVED
    assert [term.metric for term in terms] == keras_internals.compiled.compiled(
        model
    ).metrics.metrics
    (one,) = {
        float(term.weight[0])
        for term in keras_internals.compiled.metric_terms(
            keras_internals.compiled.compiled(model),
            targets,
            given[1],
            tf.ones(4) * 3.0,
        )
        if term.weight is not None
    }
    assert one == 3.0, MOVED


def test_metrics_and_losses_are_paired_by_structure_not_by_value():
    """Shapes and types do as well as tensors."""
    model = compiled_model(metrics=[["mse"], ["mae"]])
    specs = [tf.TensorSpec([None, 3]), tf.TensorSpec([None, 3], tf.float64)]
    found = keras_internals.compiled.compiled(model)
    terms = keras_internals.compiled.metric_terms(found, specs, specs, None)
    assert terms == [
        keras_internals.compiled.MetricTerm(metric, spec, spec, None)
        for metric, spec in zip(found.metrics.metrics, specs, strict=True)
    ], MOVED
    seen = []

    def evaluate(i, loss, target, output, weight):
        seen.append((target, output))
        return tf.zeros([])

    keras_internals.compiled.evaluate_loss(found, evaluate, specs, specs, None)
    assert seen == [(spec, spec) for spec in specs], MOVED


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        (keras.metrics.SparseCategoricalAccuracy(), "higher"),
        (keras.metrics.MeanIoU(2), "higher"),
        (keras.metrics.AUC(), "higher"),
        (keras.metrics.SparseCategoricalCrossentropy(), "lower"),
        (keras.metrics.MeanAbsoluteError(), "lower"),
        (keras.metrics.MeanMetricWrapper(keras.losses.huber), "lower"),
        (keras.metrics.Mean(), None),
        (keras.metrics.FalseNegatives(), None),
    ],
)
def test_a_metric_says_which_of_its_values_is_better(metric, better):
    assert keras_internals.compiled.preferred_direction(metric) == better, MOVED
