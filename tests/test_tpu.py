"""Pipelines on TPUs that are not there: placement, and what XLA makes of it.

Train steps are traced as `fit` traces them, and every operation is looked at, in the
step and in the functions it calls. The programs themselves run, compiled by XLA, with
the names of the cores on them, for a CPU. More of both is in tests/nightly/test_tpu.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests import tpu_steps
from tests.fake_tpu import core_of
from tests.test_topology import SLICES
from tests.tpu_steps import Traced, strategy_of
from tfgpipe import topology


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize(("num_stages", "num_replicas"), [(2, 2), (4, 1), (2, 1)])
def test_neighbouring_stages_are_on_neighbouring_chips(
    name: str, num_stages: int, num_replicas: int
) -> None:
    strategy = strategy_of(name, num_stages, num_replicas)
    assert strategy.num_replicas_in_sync == num_replicas
    cores = strategy.device_assignment.core_assignment
    assert cores.shape == (num_replicas, num_stages, 4)
    for path in cores.tolist():
        for a, b in itertools.pairwise(path):
            assert topology.adjacent(tuple(a), tuple(b), SLICES[name])
    used = [device for row in strategy.mesh.grid for device in row]
    assert len(set(used)) == num_stages * num_replicas


@pytest.mark.parametrize("name", ["v4-32", "v5e-16"])
def test_a_slice_of_sixteen_chips_holds_four_pipelines_of_four(name: str) -> None:
    strategy = strategy_of(name, 4, 4)
    assert np.unique(strategy.device_assignment.core_assignment, axis=1).size


def test_too_small_a_slice_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"4 stages x 2 replicas need 8 TPU cores.*4 c"
    ):
        strategy_of("v4-8", 4, 2)


FACES = [
    {"face": "model", "schedule": "zero_bubble", "slice_name": "v3-8"},
    {"face": "layer"},
]


@pytest.fixture(scope="module", params=FACES, ids=str)
def traced(request: pytest.FixtureRequest) -> Traced:
    return Traced(**request.param)


@pytest.mark.parametrize("check", tpu_steps.CHECKS, ids=lambda x: x.__name__)
def test_of_a_train_step(check: Callable[[Traced], None], traced: Traced) -> None:
    check(traced)


def _dense_model(strategy: Any, **arguments: Any) -> tfgpipe.PipelinedModel:
    with strategy.scope():
        layers = [keras.layers.Dense(4), keras.layers.Dense(4)]
        model = tfgpipe.PipelinedModel(layers, num_microbatches=2, **arguments)
        model.build((None, 4))
        model.compile("sgd", "mse")
    return model


def _trace(strategy: Any, model: keras.Model, rows: int | None = 4) -> tf.Graph:
    specs = [tf.TensorSpec([rows, 4])] * 2

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        return strategy.run(model.train_step, args=((x, y),))

    with strategy.scope():
        return step.get_concrete_function(*specs).graph


def test_an_eager_call_is_refused() -> None:
    strategy = strategy_of("v4-8", 2, 1)
    model = _dense_model(strategy)
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match=r"Received an eager call.*strategy\.run"),
    ):
        model(np.ones((4, 4), "float32"))


def test_a_batch_of_any_number_of_rows_is_refused() -> None:
    strategy = strategy_of("v4-8", 2, 1)
    with pytest.raises(ValueError, match="drop_remainder=True"):
        _trace(strategy, _dense_model(strategy), rows=None)


def test_timing_single_actions_is_refused() -> None:
    strategy = strategy_of("v4-8", 2, 1)
    model = _dense_model(strategy)
    model.recorder = object()
    with pytest.raises(ValueError, match=r"Received a TimelineCallback.*tf\.profiler"):
        _trace(strategy, model)


def test_sums_over_replicas_inside_a_pipeline_are_refused() -> None:
    strategy = strategy_of("v4-8", 2, 2)
    with strategy.scope():
        layers = [
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(synchronized=True),
        ]
        model = tfgpipe.PipelinedModel(layers, num_microbatches=1)
        model.build((None, 4))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="`synchronized=True` in training on 2 rep"):
        _trace(strategy, model)


def test_statistics_move_on_the_core_of_their_stage() -> None:
    strategy = strategy_of("v4-8", 2, 2)
    with strategy.scope():
        layers = [
            keras.layers.Dense(4),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.5, name="dropout"),
        ]
        model = tfgpipe.PipelinedModel(
            layers, num_microbatches=2, balance=[1, 3], batch_norm="deferred"
        )
        model.build((None, 4))
        model.compile("sgd", "mse")
    graph = _trace(strategy, model)
    moved = [
        op
        for op in graph.get_operations()
        if op.type.startswith("Assign")
        and re.search("moving|seed", op.inputs[0].op.name)
    ]
    assert len(moved) == 3
    assert {core_of(op) for op in moved} == {1}


def test_compiled_by_xla_the_programs_of_the_cores_give_the_same(floatx: Any) -> None:
    floatx("float64")
    tpu_steps.assert_programs_by_xla_give_the_same("1f1b", "stage")
