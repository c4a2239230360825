"""`tests/models/test_pipelined_losses.py` in full: each loss by itself."""

from __future__ import annotations

import pytest

from tests.models import test_pipelined_losses as short
from tests.models.test_pipelined_model import (
    WEIGHTS,
    X,
    Y,
    assert_fits_the_same,
    both,
    sgd,
    small,
)


@pytest.mark.parametrize("loss", ["mse", None])
@pytest.mark.parametrize("eagerly", [False, True])
def test_added_losses(loss, eagerly):
    short.test_added_losses(loss, eagerly)


@pytest.mark.parametrize("function", short.FUNCTIONS)
def test_a_function_as_a_loss(function):
    models = both(small, lambda: {"optimizer": sgd(), "loss": function})
    assert_fits_the_same(models, X, Y, epochs=1)


@pytest.mark.parametrize(
    ("mask", "ignored", "reduction", "weights"),
    [
        (True, None, "sum_over_batch_size", None),
        (True, None, "mean_with_sample_weight", short.OF_PLACES),
        (False, 0, "sum_over_batch_size", short.OF_PLACES),
        (False, 0, "sum", WEIGHTS[:, None]),
        (True, 0, "sum_over_batch_size", WEIGHTS[:, None]),
        (True, 0, "mean_with_sample_weight", None),
        (False, None, "mean_with_sample_weight", short.OF_PLACES),
        (False, None, "sum_over_batch_size", WEIGHTS[:, None]),
    ],
)
def test_what_a_loss_leaves_out(mask, ignored, reduction, weights):
    short.test_what_a_loss_leaves_out(mask, ignored, reduction, weights)


@pytest.mark.parametrize(
    ("schedule", "ignored", "mask"), [("gpipe", None, True), ("gpipe", 0, False)]
)
def test_outputs_of_the_whole_mini_batch_never_exist(schedule, ignored, mask):
    short.test_outputs_of_the_whole_mini_batch_never_exist(schedule, ignored, mask)
