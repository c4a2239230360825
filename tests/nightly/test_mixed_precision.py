"""`tests/models/test_mixed_precision.py` in full: schedules, places of overflow."""

from __future__ import annotations

import pytest

from tests.models import test_mixed_precision as short
from tfgpipe import schedules

HALF = pytest.mark.usefixtures("mixed_precision")
WHERE = pytest.mark.parametrize("where", ["input", "target"])


@pytest.mark.parametrize(
    ("policy", "how", "num_stages", "num_microbatches"),
    [
        ("mixed_bfloat16", "global", 4, 1),
        ("mixed_float16", "layer", 1, 3),
        ("mixed_bfloat16", "dtype", 3, 4),
    ],
)
def test_every_layer_computes_in_the_type_it_has_unpipelined(
    policy, how, num_stages, num_microbatches
):
    short.test_every_layer_computes_in_the_type_it_has_unpipelined(
        policy, how, num_stages, num_microbatches
    )


@HALF
@WHERE
@pytest.mark.parametrize("schedule", schedules.NAMES)
def test_an_overflow_in_one_microbatch_leaves_the_step_out(schedule, where):
    short.test_an_overflow_in_one_microbatch_leaves_the_step_out(schedule, where)


@HALF
@WHERE
@pytest.mark.parametrize("eagerly", [False, True])
def test_the_same_under_fit_of_a_pipelined_layer(where, eagerly):
    short.test_the_same_under_fit_of_a_pipelined_layer(where, eagerly)


@HALF
@pytest.mark.parametrize(
    ("schedule", "num_microbatches"), [("gpipe", 1), ("gpipe", 4), ("1f1b", 4)]
)
def test_statistics_and_seeds_move_as_without_a_pipeline(schedule, num_microbatches):
    short.test_statistics_and_seeds_move_as_without_a_pipeline(
        schedule, num_microbatches
    )


@HALF
@pytest.mark.parametrize("row", [1, 6])
@pytest.mark.parametrize("face", ["layer", "model"])
def test_an_overflow_on_one_replica_leaves_the_step_out_on_all(face, row):
    short.test_an_overflow_on_one_replica_leaves_the_step_out_on_all(face, row)
