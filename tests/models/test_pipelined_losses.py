"""Losses and metrics of `PipelinedModel`: added, leaving things out, or refused."""

from __future__ import annotations

import itertools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import zoo
from tests.helpers.custom_losses import (
    contrast,
    distance,
    mean_of_squares,
    mean_of_what_is_there,
    mean_over_rows,
    root_of_mean,
    squares_of_rows,
    sum_of_squares,
)
from tests.helpers.fitted_pairs import (
    NUM_ROWS,
    PIPELINE,
    WEIGHTS,
    X,
    Y,
    assert_fits_the_same,
    assert_same_numbers,
    assert_trains_the_same,
    both,
    regularised,
    sgd,
    small,
    two_outputs,
)
from tests.helpers.marks import nightly
from tests.helpers.token_model import IDS_IN, IDS_OUT, token_loss, tokens
from tests.helpers.zoo import IDS, floats

layers = keras.layers


# -- losses that layers and weights add -----------------------------------------------


@pytest.mark.parametrize(
    ("loss", "eagerly"),
    nightly(
        itertools.product(["mse", None], [False, True]),
        gate=[("mse", True), (None, False)],
    ),
)
def test_added_losses(loss, eagerly):
    """With a loss of the outputs, and without any."""
    models = both(
        regularised,
        lambda: {"optimizer": sgd(), "loss": loss, "run_eagerly": eagerly},
    )
    assert_trains_the_same(models, X, None if loss is None else Y)


def test_a_frozen_layer():
    def frozen():
        model = regularised()
        model.layers[1].trainable = False
        return model

    models = both(frozen, lambda: {"optimizer": sgd(), "loss": "mse"})
    before = models[1].layers[0].layers[0].kernel.numpy()
    assert_fits_the_same(models, X, Y)
    np.testing.assert_array_equal(models[1].layers[0].layers[0].kernel, before)


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_nothing_to_train():
    def frozen():
        model = small()
        model.trainable = False
        return model

    models = both(frozen, lambda: {"optimizer": sgd(), "loss": "mse"})
    assert_fits_the_same(models, X, Y)


def test_an_inner_layer_that_is_unfrozen_in_a_frozen_one_trains():
    """LoRA leaves layers so: `Backbone.enable_lora` of keras-hub, for one."""

    def unfrozen():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Reshape((5, 1)),
                layers.TimeDistributed(layers.Dense(2)),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )
        model.layers[1].trainable = False
        model.layers[1].layer.trainable = True
        model.layers[3].trainable = False
        return model

    models = both(unfrozen, lambda: {"optimizer": sgd(), "loss": "mse"})
    assert len(models[1].trainable_weights) == 2
    before = models[1].trainable_weights[0].numpy()
    assert_fits_the_same(models, X, Y)
    assert (models[1].trainable_weights[0].numpy() != before).any()


def test_freezing_after_a_first_step_is_noticed():
    models = both(small, lambda: {"optimizer": sgd(), "loss": "mse"})
    for trainable in (True, False):
        models[0].layers[2].trainable = trainable
        models[1].layers[0].layers[1].trainable = trainable
        for model in models:
            model.compile(sgd(), "mse")
        assert_fits_the_same(models, X, Y)


# -- losses of every kind -------------------------------------------------------------


FUNCTIONS = (squares_of_rows, mean_of_squares, sum_of_squares, mean_over_rows)


def test_functions_as_losses():
    """One of each output."""

    def make():
        inputs = keras.Input((5,))
        x = layers.Dense(6, activation="tanh")(inputs)
        return keras.Model(inputs, [layers.Dense(3)(x) for _ in FUNCTIONS])

    models = both(make, lambda: {"optimizer": sgd(), "loss": list(FUNCTIONS)})
    assert_fits_the_same(models, X, [Y] * len(FUNCTIONS), epochs=1)


@pytest.mark.nightly
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_as_a_loss(function):
    models = both(small, lambda: {"optimizer": sgd(), "loss": function})
    assert_fits_the_same(models, X, Y, epochs=1)


OF_PLACES = floats(NUM_ROWS, 5, seed=4) ** 2


@pytest.mark.parametrize(
    ("mask", "ignored", "reduction", "weights"),
    [
        (True, None, "mean_with_sample_weight", OF_PLACES),
        (False, 0, "sum", WEIGHTS[:, None]),
        (True, 0, "sum_over_batch_size", None),
        *nightly(
            [
                (True, None, "sum_over_batch_size", None),
                (False, 0, "sum_over_batch_size", OF_PLACES),
                (True, 0, "sum_over_batch_size", WEIGHTS[:, None]),
                (True, 0, "mean_with_sample_weight", None),
                (False, None, "mean_with_sample_weight", OF_PLACES),
                (False, None, "sum_over_batch_size", WEIGHTS[:, None]),
            ]
        ),
    ],
)
def test_what_a_loss_leaves_out(mask, ignored, reduction, weights):
    """Padding of the inputs, a class that is ignored, or both.

    `test_losses` has every combination, without a pipeline.
    """
    models = both(
        lambda: tokens(mask),
        lambda: {
            "optimizer": sgd(),
            "loss": token_loss(ignored, reduction),
            "weighted_metrics": ["accuracy"],
        },
    )
    assert_fits_the_same(models, IDS_IN, IDS_OUT, weights, epochs=1)


def test_what_is_left_out_when_evaluated_and_of_unequal_outputs():
    """Masks of several outputs, some of them from the middle of the pipeline."""
    models = both(zoo.masked_outputs, lambda: {"optimizer": sgd(), "loss": ["mse"] * 4})
    x = zoo.ZOO["masked_outputs"].data(NUM_ROWS)
    y = [floats(NUM_ROWS, *shape) for shape in ((6, 3), (4, 3), (3,), (4, 2))]
    # Batches are of one size, so a mean over them is one over rows.
    models[0].run_eagerly = True
    assert_fits_the_same(models, x, y, batch_size=5, epochs=1)
    scores = [m.evaluate(x, y, batch_size=5, verbose=0) for m in models]
    assert_same_numbers(*scores)


def test_a_microbatch_of_nothing_that_counts():
    """Not a number would be all that is left of the loss."""
    models = both(
        lambda: tokens(mask=True),
        lambda: {"optimizer": sgd(), "loss": token_loss(0, "sum_over_batch_size")},
    )
    y = np.where(np.arange(NUM_ROWS)[:, None] % 4 < 2, 0, IDS_OUT)
    assert_fits_the_same(models, IDS_IN, y)


# -- losses that are refused ----------------------------------------------------------


def fitted(loss, *data, make=small, sample_weight=None):
    model = tfgpipe.pipeline(make(), **PIPELINE)
    model.compile("sgd", loss)
    data = data or (X, Y)
    model.fit(*data, batch_size=4, sample_weight=sample_weight, verbose=0)
    return model


def mean_of_known_classes(y, p):
    there = tf.cast(y > 0, p.dtype)
    values = keras.ops.sparse_categorical_crossentropy(y, p, from_logits=True)
    return tf.reduce_sum(there * values) / tf.maximum(tf.reduce_sum(there), 1.0)


@pytest.mark.parametrize("loss", [root_of_mean, contrast, mean_of_what_is_there])
def test_a_loss_that_mixes_rows_is_of_all_of_them(loss):
    models = both(small, lambda: {"optimizer": sgd(), "loss": loss})
    with pytest.warns(UserWarning, match=f"Loss '{loss.__name__}' couples the exampl"):
        assert_fits_the_same(models, X, Y)


@pytest.mark.filterwarnings("ignore:Loss:UserWarning")
def test_a_loss_that_divides_by_what_counts_is_of_all_that_count():
    compiled = {"loss": mean_of_known_classes}
    models = both(tokens, lambda: {"optimizer": sgd(), **compiled})
    assert_fits_the_same(models, IDS_IN, IDS_OUT)


@pytest.mark.parametrize("reduction", [None, "none"])
def test_a_loss_that_is_not_reduced_is_refused(reduction):
    words = r"'mean_squared_error' with reduction=None.* Use reduction=\"sum_over"
    with pytest.raises(ValueError, match=words):
        fitted(keras.losses.MeanSquaredError(reduction=reduction))


@pytest.mark.parametrize("loss", [mean_of_squares, sum_of_squares])
def test_sample_weights_for_one_number_are_refused(loss):
    words = f"loss '{loss.__name__}', which returns one number for all. Return a"
    with pytest.raises(ValueError, match=words):
        fitted(loss, sample_weight=WEIGHTS)


@pytest.mark.parametrize("method", ["compute_loss", "compute_metrics"])
def test_a_method_that_sees_the_whole_mini_batch_is_refused(method):
    kind = type("Own", (tfgpipe.PipelinedModel,), {method: lambda self, *_, **__: 0.0})
    model = kind(small(), **PIPELINE)
    model.compile("sgd", "mse")
    words = (
        rf"`{method}` of your own .* Received Own, which has .* `tfgpipe.PipelinedLa"
    )
    with pytest.raises(TypeError, match=words):
        model.fit(X, Y, verbose=0)


# -- metrics that need the whole mini-batch -------------------------------------------


def of_the_whole():
    along_rows = keras.metrics.PearsonCorrelation(axis=0, name="along_rows")
    return {
        "optimizer": sgd(),
        "loss": "mse",
        "metrics": ["mae", along_rows, distance],
        "weighted_metrics": ["mse"],
    }


def test_metrics_that_mix_rows_are_plain_keras_and_named_in_a_warning():
    models = both(small, of_the_whole)
    words = (
        r"Received 'along_rows', 'distance', which mix examples .* to save that memory"
    )
    with pytest.warns(UserWarning, match=words):
        assert_trains_the_same(models, X, Y, WEIGHTS)


def test_metrics_of_the_whole_of_several_outputs():
    models = both(
        zoo.two_in_two_out,
        lambda: {
            "optimizer": sgd(),
            "loss": ["mse", "sparse_categorical_crossentropy"],
            "metrics": {"price": ["mae", distance], "kind": ["accuracy"]},
        },
        num_stages=3,
    )
    with pytest.warns(UserWarning, match="Received 'distance', which mix"):
        assert_fits_the_same(models, *two_outputs())


def test_no_warning_without_such_metrics():
    model = tfgpipe.pipeline(small(), **PIPELINE)
    model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Outputs of the whole")
        model.train_on_batch(X, Y)


# -- what is never put together -------------------------------------------------------


def shapes_that_run(graph) -> list[list[int | None]]:
    """Returns the shapes of all that a graph, and functions that it calls, computes."""
    running, pending = set(), [x.op for x in graph.outputs] + [*graph.control_outputs]
    while pending:
        op = pending.pop()
        if op not in running:
            running.add(op)
            pending += [x.op for x in op.inputs] + [*op.control_inputs]
    shapes = [x.shape for op in running for x in op.outputs]
    library = graph.as_graph_def(add_shapes=True).library.function
    for function in library:
        for node in function.node_def:
            shapes += map(tf.TensorShape, node.attr["_output_shapes"].list.shape)
    return [shape.as_list() for shape in shapes if shape.rank is not None]


@pytest.mark.parametrize(
    ("schedule", "ignored", "mask"),
    [
        ("gpipe", None, False),
        ("1f1b", 0, True),
        *nightly([("gpipe", None, True), ("gpipe", 0, False)]),
    ],
)
def test_outputs_of_the_whole_mini_batch_never_exist(schedule, ignored, mask):
    rows, num_microbatches = 12, 3
    model = tfgpipe.pipeline(
        tokens(mask),
        num_stages=2,
        num_microbatches=num_microbatches,
        schedule=schedule,
    )
    loss = token_loss(ignored, "sum_over_batch_size")
    model.compile(sgd(), loss, metrics=["accuracy"])
    model.train_on_batch(IDS_IN, IDS_OUT)
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    spec = tf.TensorSpec([rows, 5], tf.int32)
    shapes = shapes_that_run(step.get_concrete_function(spec, spec).graph)
    assert [rows // num_microbatches, 5, IDS] in shapes
    assert [rows, 5, IDS] not in shapes
    assert [rows * 5, IDS] not in shapes


def test_layers_run_for_their_masks_alone_as_little_as_can_be():
    """What they print, assert or draw happens once a microbatch and pass."""

    class Counts(layers.Layer):
        def __init__(self):
            super().__init__()
            self.supports_masking = True

        def call(self, x):
            def note(x):
                seen.append(len(x))
                return x

            return tf.ensure_shape(tf.numpy_function(note, [x], x.dtype), x.shape)

    def make():
        inputs = keras.Input((5,), dtype="int32")
        x = Counts()(layers.Embedding(IDS, 4, mask_zero=True)(inputs))
        return keras.Model(inputs, layers.Dense(IDS)(x))

    seen: list[int] = []
    model = tfgpipe.pipeline(make(), **PIPELINE, remat="none")
    seen.clear()  # Of the probe.
    model.layers[0].layers[0].trainable = False
    model.compile(sgd(), token_loss(None, "sum_over_batch_size"))
    model.train_on_batch(IDS_IN[:6], IDS_OUT[:6])
    assert seen == [2, 2, 2]
