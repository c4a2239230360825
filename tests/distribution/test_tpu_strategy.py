"""Pipelines on TPUs that are not there: placement, and what XLA makes of it.

Train steps are traced as `fit` traces them, and every operation is looked at, in the
step and in the functions it calls. The programs themselves run, compiled by XLA, with
the names of the cores on them, for a CPU.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import fake_tpu
from tests.helpers.fake_tpu import core_of
from tests.helpers.xla import assert_programs_by_xla_give_the_same
from tests.pure.devices.test_tpu_topology import SLICES
from tfgpipe._compat import functions
from tfgpipe.devices import tpu_topology

# Widths of the layers, by which an operation is told to be of one: none is the number
# of rows in a microbatch, and none occurs twice.
WIDTHS = (6, 7, 9, 10, 11, 12, 13, 14)


def _strategy(name: str, num_stages: int, num_replicas: int) -> Any:
    shape = SLICES[name]
    return tfgpipe.TPUPipelineStrategy(
        fake_tpu.Resolver(int(np.prod(shape))),
        num_stages=num_stages,
        num_replicas=num_replicas,
        slice_topology=fake_tpu.Topology(shape),
    )


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize(("num_stages", "num_replicas"), [(2, 2), (4, 1), (2, 1)])
def test_neighbouring_stages_are_on_neighbouring_chips(
    name: str, num_stages: int, num_replicas: int
) -> None:
    strategy = _strategy(name, num_stages, num_replicas)
    assert strategy.num_replicas_in_sync == num_replicas
    cores = strategy.device_assignment.core_assignment
    assert cores.shape == (num_replicas, num_stages, 4)
    for path in cores.tolist():
        for a, b in itertools.pairwise(path):
            assert tpu_topology.adjacent(tuple(a), tuple(b), SLICES[name])
    used = [device for row in strategy.mesh.primary_devices for device in row]
    assert len(set(used)) == num_stages * num_replicas


@pytest.mark.parametrize("name", ["v4-32", "v5e-16"])
def test_a_slice_of_sixteen_chips_holds_four_pipelines_of_four(name: str) -> None:
    strategy = _strategy(name, 4, 4)
    assert np.unique(strategy.device_assignment.core_assignment, axis=1).size


def test_too_small_a_slice_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"4 stages x 2 replicas need 8 TPU cores.*4 c"
    ):
        _strategy("v4-8", 4, 2)


class _Traced:
    """A model under a strategy, and the train step that `fit` traces.

    Args:
        slice_name: One of `SLICES`.
        num_stages: K.
        num_replicas: D.
        **arguments: Of the model.
    """

    def __init__(
        self,
        slice_name: str = "v4-8",
        num_stages: int = 2,
        num_replicas: int = 2,
        *,
        face: str = "model",
        optimizer: str = "adam",
        **arguments: Any,
    ) -> None:
        self.strategy = _strategy(slice_name, num_stages, num_replicas)
        per_stage = (len(WIDTHS) - 1) // num_stages
        counts = [per_stage] * num_stages
        names = [f"stage{i // per_stage}_{i}" for i in range(sum(counts))]
        self.widths = WIDTHS[: len(names) + 1]
        with self.strategy.scope():
            layers: list[keras.layers.Layer] = [
                keras.layers.Dense(width, activation="relu", name=name)
                for width, name in zip(self.widths[1:], names, strict=True)
            ]
            arguments = {"num_microbatches": 2, "balance": counts, **arguments}
            if face == "model":
                self.model = tfgpipe.PipelinedModel(layers, **arguments)
                self.model.build((None, self.widths[0]))
            else:
                pipelined = tfgpipe.PipelinedLayer(layers, **arguments)
                inputs = keras.Input([self.widths[0]])
                self.model = keras.Model(inputs, pipelined(inputs))
            self.model.compile(optimizer, "mse", metrics=["mae"])
        rows = 4 * num_replicas
        data = tf.data.Dataset.from_tensors(
            (np.ones((rows, self.widths[0])), np.ones((rows, self.widths[-1])))
        )
        data = data.unbatch().batch(rows, drop_remainder=True)
        with self.strategy.scope(), functions.grappler_off():
            iterator = iter(self.strategy.experimental_distribute_dataset(data))
            self.model.make_train_function()
            function = self.model.train_function
            function = getattr(function, "function", function)
            step = inspect.getclosurevars(function).nonlocals["multi_step_on_iterator"]
            self.graph = step.get_concrete_function(iterator).graph
        # The step, and all that it calls.
        self.operations = list(fake_tpu.operations(self.graph))

    def stage_of_shape(self, *shape: int | None) -> int | None:
        """Returns the stage whose weights are as large, either way round."""
        for i, pair in enumerate(itertools.pairwise(self.widths)):
            if sorted(pair) == sorted(n or 0 for n in shape):
                return int(self.model_layers[i].name[len("stage")])
        return None

    @property
    def model_layers(self) -> Sequence[keras.layers.Layer]:
        pipelined = getattr(self.model, "pipelined", self.model.layers[-1])
        return pipelined.layers


FACES = [
    {"face": "model"},
    {"face": "model", "schedule": "1f1b", "remat": "none"},
    {"face": "model", "schedule": "zero_bubble", "slice_name": "v3-8"},
    {"face": "model", "num_stages": 3, "num_replicas": 1, "optimizer": "adamw"},
    {"face": "layer"},
]


@pytest.fixture(scope="module", params=FACES, ids=str)
def traced(request: pytest.FixtureRequest) -> _Traced:
    return _Traced(**request.param)


def test_weights_and_slots_are_on_the_cores_of_their_stage(traced: _Traced) -> None:
    strategy, checked = traced.strategy, 0
    for variable in (*traced.model.variables, *traced.model.optimizer.variables):
        found = re.search(r"stage(\d)_", variable.path)
        if found:
            copies = strategy.experimental_local_results(variable.value)
            where = tuple(copy.device for copy in copies)
            assert where == strategy.mesh.replica_devices(int(found[1])), variable.path
            checked += 1
    assert checked == 6 * len(traced.model_layers)  # Two weights, of two slots each.


def test_every_matrix_product_is_on_the_core_of_its_stage(traced: _Traced) -> None:
    products = [op for op in traced.operations if op.type == "MatMul"]
    for op in products:
        shapes = {n for x in (*op.inputs, *op.outputs) for n in x.shape}
        stage = traced.stage_of_shape(*(shapes & set(traced.widths)))
        assert stage is not None
        assert core_of(op) == stage, op
    # Forward and backward of each layer, not counting what is recomputed.
    assert len(products) >= 3 * len(traced.model_layers) - 1


def test_variables_are_read_and_updated_on_the_core_of_their_stage(
    traced: _Traced,
) -> None:
    variables = (*traced.model.variables, *traced.model.optimizer.variables)
    paths = {id(v.value._packed_var.packed_handle): v.path for v in variables}
    assigned = set()
    for op in traced.operations:
        for source in [x.op for x in op.inputs if x.op.type == "TPUReplicatedInput"]:
            path = paths.get(id(fake_tpu.captured(source.inputs[0])), "")
            found = re.search(r"stage(\d)_", path)
            if found:
                assert core_of(op) == int(found[1]), op
                if op.type.startswith("Assign"):
                    assigned.add(path)
    assert len(assigned) == 6 * len(traced.model_layers)


def test_whatever_is_as_large_as_a_weight_is_on_the_core_of_its_stage(
    traced: _Traced,
) -> None:
    for op in traced.operations:
        # Which pass on what they are given, and which XLA makes nothing of.
        if op.type in ("Placeholder", "Identity", "IdentityN", "TPUReplicatedInput"):
            continue
        for output in op.outputs:
            if output.shape.rank == 2 and output.consumers():
                stage = traced.stage_of_shape(*output.shape)
                assert stage is None or core_of(op) == stage, op


def test_nothing_of_the_computation_is_on_the_host(traced: _Traced) -> None:
    assert not [op for op in traced.operations if "CPU" in op.device]
    attributes = {name for op in traced.operations for name in op.node_def.attr}
    assert "_tpu_replicate" in attributes
    assert "_xla_outside_compilation" not in attributes
    outside = {
        op.type
        for op in traced.graph.get_operations()
        if op.type not in ("Const", "NoOp", "Placeholder", "Identity")
        and not op.node_def.attr["_tpu_replicate"].s
    }
    assert not {"MatMul", "Mul", "AddV2", "ReadVariableOp", "AssignSubVariableOp"} & (
        outside
    )


def test_the_computation_is_for_all_replicas_on_the_cores_assigned(
    traced: _Traced,
) -> None:
    (metadata,) = (op for op in traced.operations if op.type == "TPUReplicateMetadata")
    cores = traced.strategy.device_assignment.core_assignment
    assert metadata.get_attr("num_replicas") == len(cores)
    assert metadata.get_attr("num_cores_per_replica") == len(cores[0])
    assert metadata.get_attr("device_assignment") == cores.flatten().tolist()
    sums = [op for op in traced.operations if op.type == "CrossReplicaSum"]
    assert bool(sums) == (len(cores) > 1)


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
    strategy = _strategy("v4-8", 2, 1)
    model = _dense_model(strategy)
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match=r"Received an eager call.*strategy\.run"),
    ):
        model(np.ones((4, 4), "float32"))


def test_a_batch_of_any_number_of_rows_is_refused() -> None:
    strategy = _strategy("v4-8", 2, 1)
    with pytest.raises(ValueError, match="drop_remainder=True"):
        _trace(strategy, _dense_model(strategy), rows=None)


def test_timing_single_actions_is_refused() -> None:
    strategy = _strategy("v4-8", 2, 1)
    model = _dense_model(strategy)
    model.recorder = object()
    with pytest.raises(ValueError, match=r"Received a TimelineCallback.*tf\.profiler"):
        _trace(strategy, model)


def test_sums_over_replicas_inside_a_pipeline_are_refused() -> None:
    strategy = _strategy("v4-8", 2, 2)
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
    strategy = _strategy("v4-8", 2, 2)
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
    """Of another schedule in tests/nightly/test_tpu.py."""
    floatx("float64")
    assert_programs_by_xla_give_the_same("1f1b", "stage")
