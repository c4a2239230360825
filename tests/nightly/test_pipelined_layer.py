"""`tests/models/test_pipelined_layer.py` for each model, eager and graph."""

from __future__ import annotations

import pytest

from tests.models import test_pipelined_layer as short


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("kind", short.KINDS)
def test_fit_evaluate_and_predict_are_the_plain_models(kind, run_eagerly):
    short.test_fit_evaluate_and_predict_are_the_plain_models(kind, run_eagerly)


def test_weights_saved_at_four_stages_load_at_four(tmp_path):
    short.test_weights_saved_at_four_stages_load_at_any_number(tmp_path, 4)


def test_tensorflow_checkpoints_of_four_stages_load_at_four(tmp_path):
    short.test_tensorflow_checkpoints_do_not_depend_on_the_cut(tmp_path, 4)
