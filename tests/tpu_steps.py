"""Train steps for TPUs that are not there, as `fit` traces them, and what they hold."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tests import fake_tpu
from tests.fake_tpu import core_of
from tests.test_topology import SLICES
from tfgpipe import calls, mesh, placement, schedules, seams

# Widths of the layers, by which an operation is told to be of one: none is the number
# of rows in a microbatch, and none occurs twice.
WIDTHS = (6, 7, 9, 10, 11, 12, 13, 14)


def strategy_of(name: str, num_stages: int, num_replicas: int) -> Any:
    shape = SLICES[name]
    return tfgpipe.TPUPipelineStrategy(
        fake_tpu.Resolver(int(np.prod(shape))),
        num_stages=num_stages,
        num_replicas=num_replicas,
        slice_topology=fake_tpu.Topology(shape),
    )


class Traced:
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
        self.strategy = strategy_of(slice_name, num_stages, num_replicas)
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
        with self.strategy.scope(), calls.unoptimized():
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


def weights_and_slots_are_on_the_cores_of_their_stage(traced: Traced) -> None:
    strategy, checked = traced.strategy, 0
    for variable in (*traced.model.variables, *traced.model.optimizer.variables):
        found = re.search(r"stage(\d)_", variable.path)
        if found:
            copies = strategy.experimental_local_results(variable.value)
            where = tuple(copy.device for copy in copies)
            assert where == strategy.mesh.stage(int(found[1])), variable.path
            checked += 1
    assert checked == 6 * len(traced.model_layers)  # Two weights, of two slots each.


def every_matrix_product_is_on_the_core_of_its_stage(traced: Traced) -> None:
    products = [op for op in traced.operations if op.type == "MatMul"]
    for op in products:
        shapes = {n for x in (*op.inputs, *op.outputs) for n in x.shape}
        stage = traced.stage_of_shape(*(shapes & set(traced.widths)))
        assert stage is not None
        assert core_of(op) == stage, op
    # Forward and backward of each layer, not counting what is recomputed.
    assert len(products) >= 3 * len(traced.model_layers) - 1


def variables_are_read_and_updated_on_the_core_of_their_stage(
    traced: Traced,
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


def whatever_is_as_large_as_a_weight_is_on_the_core_of_its_stage(
    traced: Traced,
) -> None:
    for op in traced.operations:
        # Which pass on what they are given, and which XLA makes nothing of.
        if op.type in ("Placeholder", "Identity", "IdentityN", "TPUReplicatedInput"):
            continue
        for output in op.outputs:
            if output.shape.rank == 2 and output.consumers():
                stage = traced.stage_of_shape(*output.shape)
                assert stage is None or core_of(op) == stage, op


def nothing_of_the_computation_is_on_the_host(traced: Traced) -> None:
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


def the_computation_is_for_all_replicas_on_the_cores_assigned(
    traced: Traced,
) -> None:
    (metadata,) = (op for op in traced.operations if op.type == "TPUReplicateMetadata")
    cores = traced.strategy.device_assignment.core_assignment
    assert metadata.get_attr("num_replicas") == len(cores)
    assert metadata.get_attr("num_cores_per_replica") == len(cores[0])
    assert metadata.get_attr("device_assignment") == cores.flatten().tolist()
    sums = [op for op in traced.operations if op.type == "CrossReplicaSum"]
    assert bool(sums) == (len(cores) > 1)


CHECKS: list[Callable[[Traced], None]] = [
    weights_and_slots_are_on_the_cores_of_their_stage,
    every_matrix_product_is_on_the_core_of_its_stage,
    variables_are_read_and_updated_on_the_core_of_their_stage,
    whatever_is_as_large_as_a_weight_is_on_the_core_of_its_stage,
    nothing_of_the_computation_is_on_the_host,
    the_computation_is_for_all_replicas_on_the_cores_assigned,
]


@dataclasses.dataclass(frozen=True)
class _OnCores(placement.Placement):
    """Names the cores, outside any strategy."""

    @property
    def shards(self) -> tuple[tuple[str, ...], ...]:
        return tuple((mesh.core(k),) for k in range(self.mesh.num_stages))


def _layers() -> list[keras.layers.Layer]:
    return [
        keras.layers.Embedding(10, 8),
        keras.layers.Dense(8, activation="gelu"),
        keras.layers.LayerNormalization(),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ]


def assert_programs_by_xla_give_the_same(schedule: Any, remat: Any) -> None:
    """Asserts that programs that name cores, compiled by XLA, give what others do.

    Args:
        schedule: A schedule's name.
        remat: What is recomputed.
    """
    x = np.arange(8 * 4).reshape(8, 4) % 10
    y = np.linspace(0, 1, 8)[:, None]
    keras.utils.set_random_seed(1)
    model = tfgpipe.PipelinedModel(
        _layers(),
        num_stages=2,
        num_microbatches=4,
        remat=remat,
        batch_norm="deferred",
        devices=["CPU:0", "CPU:0"],
    )
    model(x)
    model.compile("sgd", "mse")
    seams.build_compiled(model, (x, y))
    order = schedules.make(schedule, num_stages=2, num_microbatches=4)

    def gradients(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        model._loss_pipelines.clear()
        with seams.without_autocast():
            result = model._loss_pipeline(y, None).train(
                model.pipelined.assembly.wires(x, {}),
                y,
                None,
                schedule=order,
                loss_grad=tf.ones([], tf.float64),
            )
        return [
            result.main_loss,
            *(result.gradients[id(v)] for v in model.trainable_weights),
            *(change.value for change in result.changes),
        ]

    before = model.get_weights()
    expected = tf.function(gradients)(tf.constant(x), tf.constant(y))
    model.set_weights(before)  # Statistics have moved.
    assembly = model.pipelined.assembly
    on_cores = _OnCores(assembly.placement.mesh, None)
    model.pipelined._assembly = dataclasses.replace(assembly, placement=on_cores)
    compiled = tf.function(gradients, jit_compile=True)
    received = compiled(tf.constant(x), tf.constant(y))
    for plain, by_xla in zip(expected, received, strict=True):
        np.testing.assert_allclose(by_xla, plain, rtol=1e-10, atol=1e-12)
    graph = compiled.get_concrete_function(tf.constant(x), tf.constant(y)).graph
    named = {core_of(op) for op in fake_tpu.operations(graph)}
    assert named >= {0, 1}
    # What keeps XLA from keeping what is to be recomputed.
    text = compiled.experimental_get_compiler_ir(tf.constant(x), tf.constant(y))()
    assert "opt-barrier" in text
