"""`tests/models/test_other_libraries.py` with the rivals' own numbers."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.layer_stacks import REMAT_MODES, STACKS
from tests.helpers.zoo import ids
from tests.models import test_other_libraries as short

# Numbers of stages and microbatches, as Lingvo takes them.
FEW = list(itertools.product((1, 2), (1, 2)))


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("k", range(4))
def test_a_stage_that_fails_ends_the_step_and_not_the_next_one(k, way, graph):
    short.test_a_stage_that_fails_ends_the_step_and_not_the_next_one(k, way, graph)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize("remat", REMAT_MODES)
def test_just_so_many_microbatches_are_recomputed(remat, num_microbatches):
    short.test_just_so_many_microbatches_are_recomputed(remat, num_microbatches)


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("training", [False, True])
def test_without_gradients_there_is_nothing_for_gradients(training, remat):
    short.test_without_gradients_there_is_nothing_for_gradients(training, remat)


@pytest.mark.parametrize("remat", ["layer", "except_last"])
def test_gradients_that_layers_define_are_taken(remat):
    short.test_gradients_that_layers_define_are_taken(remat)


def test_gradients_are_the_differences_of_a_language_models_loss(floatx):
    floatx("float64")
    model = tfgpipe.pipeline(
        short.causal_language_model(), num_stages=2, num_microbatches=2
    )
    x, y = ids(3, 5), ids(3, 5, seed=2)

    @tf.function
    def loss():
        loss = keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )
        return tf.reduce_mean(loss)

    with tf.GradientTape() as tape:
        value = loss()
    gradients = tape.gradient(value, model.trainable_variables)
    rng = np.random.default_rng(0)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        gradient = tf.convert_to_tensor(gradient).numpy()
        before = variable.numpy()
        for _ in range(2):
            where = tuple(rng.integers(before.shape))
            sides = []
            for step in (-1e-5, 1e-5):
                moved = before.copy()
                moved[where] += step
                variable.assign(moved)
                sides.append(loss().numpy())
            variable.assign(before)
            slope = (sides[1] - sides[0]) / 2e-5
            assert gradient[where] == pytest.approx(slope, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "num_dropouts", "remat"),
    [
        *((K, M, 10, "stage") for K, M in FEW),
        *((2, 10, 10, remat) for remat in REMAT_MODES),
        (2, 10, 100, "stage"),
    ],
)
def test_what_dropouts_drop_they_drop_again(
    num_stages, num_microbatches, num_dropouts, remat
):
    short.test_what_dropouts_drop_they_drop_again(
        num_stages, num_microbatches, num_dropouts, remat
    )


@pytest.mark.parametrize("num_stages", [1, 2])
def test_deferred_averages_do_not_depend_on_the_cut(num_stages, floatx):
    short.test_deferred_averages_do_not_depend_on_the_cut(num_stages, floatx)


@pytest.mark.parametrize("remat", ["stage", "none"])
def test_steps_leave_no_tensor_and_no_graph_behind(remat):
    short.test_steps_leave_no_tensor_and_no_graph_behind(remat, 15)


@pytest.mark.parametrize("name", ["dense", "embedded"])
def test_twenty_iterations_of_an_optimizer(name, floatx):
    floatx("float64")
    chosen = STACKS[name]
    dtype = "float64" if chosen.dtype == "float32" else chosen.dtype
    models = compare.pair(
        chosen.make, chosen.shape, dtype, num_stages=4, num_microbatches=3
    )
    x = tf.constant(chosen.data(8).astype(dtype))

    def train(model):
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = compare.squares(model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        losses = [step(x).numpy() for _ in range(20)]
        return losses, [v.numpy() for v in (*model.variables, *optimizer.variables)]

    (losses, variables), (other_losses, others) = map(train, models)
    assert losses[-1] < 0.9 * losses[0]
    compare.close(np.array(losses), np.array(other_losses), "losses", **short.DOUBLE)
    for i, (a, b) in enumerate(zip(variables, others, strict=True)):
        compare.close(np.float64(a), np.float64(b), f"variable {i}", **short.DOUBLE)


@pytest.mark.parametrize(
    "devices",
    [["CPU:0", "CPU:1", "CPU:0"], ["CPU:3", "CPU:3", "CPU:3"]],
    ids=" ".join,
)
def test_stages_may_share_devices_in_any_order(devices):
    short.test_stages_may_share_devices_in_any_order(devices)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), FEW)
def test_what_the_first_stage_gives_beside_comes_out_whole(
    num_stages, num_microbatches
):
    short.test_what_the_first_stage_gives_beside_comes_out_whole(
        num_stages, num_microbatches
    )


@pytest.mark.parametrize(("num_stages", "num_microbatches"), FEW)
def test_a_structure_with_nothing_in_a_place_keeps_it(num_stages, num_microbatches):
    short.test_a_structure_with_nothing_in_a_place_keeps_it(
        num_stages, num_microbatches
    )


GRID = [*({"num_stages": K, "num_microbatches": M} for K, M in FEW), {"first": 3}]


@pytest.mark.parametrize("arguments", GRID, ids=str)
@pytest.mark.parametrize("name", ["transparent", "language_model"])
def test_transparent_attention_and_language_models(name, arguments):
    short.test_transparent_attention_language_models_and_translators(name, arguments)


def test_packed_sequences_give_what_they_give_apart():
    short.test_packed_sequences_give_what_they_give_apart(1)


def test_decoding_step_by_step_gives_the_full_pass():
    short.test_decoding_step_by_step_gives_the_full_pass(1, graph=False)


@pytest.mark.parametrize("depth", [4, 8])
def test_stacked_recurrent_layers(depth):
    short.test_stacked_recurrent_layers(depth)
