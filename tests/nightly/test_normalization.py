"""`tests/stage/test_normalization.py` in full: each choice of recomputation."""

from __future__ import annotations

import pytest

from tests.helpers.layer_stacks import REMAT_MODES
from tests.stage import test_normalization as short

# Every choice of recomputation, and every one of a few numbers of microbatches.
WAYS = [("stage", 3), ("layer", 3), ("except_last", 2), ("none", 5), ("stage", 1)]
BOTH = pytest.mark.parametrize("remat", ["stage", "layer"])


@pytest.mark.parametrize(("remat", "num_microbatches"), WAYS)
def test_gradients_and_averages_are_those_of_the_reference(remat, num_microbatches):
    short.test_gradients_and_averages_are_those_of_the_reference(
        remat, num_microbatches
    )


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_an_unknown_batch_size_and_an_empty_microbatch(remat):
    short.test_an_unknown_batch_size_and_an_empty_microbatch(remat)


@BOTH
def test_double_precision_leaves_nothing_to_tolerance(remat):
    short.test_double_precision_leaves_nothing_to_tolerance(remat)


@BOTH
def test_five_steps_of_an_optimizer(remat):
    short.test_five_steps_of_an_optimizer(remat)


@pytest.mark.parametrize(
    ("num_microbatches", "shape", "arguments"),
    [
        (2, (5,), {"momentum": 0.5}),
        (5, (5,), {"momentum": 0.99}),
        (3, (5,), {"momentum": 1.0}),
        (3, (4, 6, 3), {}),
    ],
)
def test_averages_are_those_of_the_plain_layer(num_microbatches, shape, arguments):
    short.test_averages_are_those_of_the_plain_layer(num_microbatches, shape, arguments)


@BOTH
def test_masked_positions_do_not_count(remat):
    short.test_masked_positions_do_not_count(remat)


@BOTH
def test_a_layer_called_twice_moves_its_averages_twice(remat):
    short.test_a_layer_called_twice_moves_its_averages_twice(remat)


def test_outside_a_pipeline_it_is_the_layer_of_keras():
    short.test_outside_a_pipeline_it_is_the_layer_of_keras(1.0)


@BOTH
@pytest.mark.parametrize("make", [short.listed, short.functional])
def test_converted_layers_do_as_deferred_ones(make, remat):
    short.test_converted_layers_do_as_deferred_ones(make, remat)


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_replicas_average_their_averages_as_keras_does(num_microbatches):
    short.test_replicas_average_their_averages_as_keras_does(num_microbatches)
