"""SPMD pipelines on TPUs that are not there: what is stored where, and what is traced.

The step itself runs partitioned in `tests/spmd/test_step.py`, on CPUs.
"""

from __future__ import annotations

import collections
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import fake_tpu
from tests.helpers.tpu_slices import SLICES
from tests.helpers.transformer_blocks import Block, data, model, pipeline_of


def _strategy(num_stages: int, num_replicas: int) -> tfgpipe.SPMDPipelineStrategy:
    return tfgpipe.SPMDPipelineStrategy(
        fake_tpu.Resolver(4),
        num_stages=num_stages,
        num_replicas=num_replicas,
        slice_topology=fake_tpu.Topology(SLICES["v4-8"]),
    )


def _model(strategy: Any, num_stages: int) -> keras.Model:
    with strategy.scope():
        blocks = [Block() for _ in range(2 * num_stages)]
        made = model(blocks, num_stages=num_stages, num_microbatches=4)
        made.optimizer.build(made.trainable_variables)
    return made


def _parts(variable: keras.Variable) -> list[list[tuple[int, ...]]]:
    """Returns the shapes of what each core has, for each replica."""
    return [[tuple(v.shape) for v in copy] for copy in variable.value.values]


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(2, 2), (4, 1)])
def test_each_core_stores_its_row_of_weights_and_slots(
    num_stages: int, num_replicas: int
) -> None:
    strategy = _strategy(num_stages, num_replicas)
    made = _model(strategy, num_stages)
    checked = 0
    for variable in (*made.variables, *made.optimizer.variables):
        rows = [variable.shape] * num_stages
        if "spmd_pipeline" in variable.path:
            assert variable.shape[0] == num_stages
            rows = [(1, *variable.shape[1:])] * num_stages
            checked += 1
        assert _parts(variable) == [rows] * num_replicas, variable.path
    # Two layers a stage, six weights each, and two slots a weight.
    assert checked == 2 * 6 * 3
    for copy in pipeline_of(made).weights[0].value.values:
        assert len({v.device for v in copy}) == num_stages


def test_variables_are_read_assigned_and_saved_as_a_whole(tmp_path: Any) -> None:
    made = _model(_strategy(2, 2), 2)
    pipelined = pipeline_of(made)
    assert len(made.get_weights()) == len(made.weights)
    variable = pipelined.trainable_variables[2]
    plain = [layer.inner.kernel for layer in pipelined.layers[::2]]
    np.testing.assert_array_equal(variable, np.stack([np.asarray(v) for v in plain]))
    checkpoint = tf.train.Checkpoint(model=made)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    saved = np.asarray(variable)
    variable.assign(saved + 1)
    np.testing.assert_array_equal(variable, saved + 1)
    pipelined.unstack()
    np.testing.assert_array_equal(plain[1], saved[1] + 1)
    checkpoint.read(path)
    np.testing.assert_array_equal(variable, saved)


def test_the_layers_that_were_given_are_on_the_host() -> None:
    pipelined = pipeline_of(_model(_strategy(2, 1), 2))
    kernel = pipelined.layers[3].inner.kernel
    assert kernel.value.device.endswith("CPU:0")
    assert not hasattr(kernel.value, "values")


def test_the_step_is_partitioned_and_takes_parts_of_the_variables() -> None:
    strategy = _strategy(2, 2)
    made = _model(strategy, 2)
    specs = [tf.TensorSpec(x.shape, tf.int32) for x in data(8)]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        return strategy.run(made.train_step, args=((x, y),))

    with strategy.scope():
        graph = step.get_concrete_function(*specs).graph
    operations = list(fake_tpu.operations(graph))
    (metadata,) = (op for op in operations if op.type == "TPUReplicateMetadata")
    assert metadata.get_attr("use_spmd_for_xla_partitioning")
    assert metadata.get_attr("num_replicas") == 2
    assert metadata.get_attr("num_cores_per_replica") == 2
    # One for each replica of each variable.
    split = [
        op
        for op in operations
        if op.type == "TPUPartitionedInputV2" and op.get_attr("partition_dims")
    ]
    trained = pipeline_of(made).trainable_variables
    assert len(split) == 2 * 3 * len(trained)
    for op in split:
        assert op.get_attr("partition_dims")[0] == 2
        assert op.node_def.attr["_XlaSharding"].s
        assert len(op.inputs) == 2
    counts = collections.Counter(op.type for op in operations)
    assert counts["XlaSpmdFullToShardShape"]
    assert counts["XlaSpmdShardToFullShape"]
    assert not [op for op in operations if "TPU_REPLICATED_CORE" in op.device]


def test_the_compiler_of_tensorflow_for_tpus_splits_arguments_as_variables_are() -> (
    None
):
    """Its passes before XLA are in every TensorFlow; what they make is not run."""
    strategy = _strategy(2, 1)
    with strategy.scope():
        layers = [keras.layers.Dense(4) for _ in range(2)]
        pipelined = tfgpipe.SPMDPipeline(layers, num_stages=2, num_microbatches=2)
        made = keras.Sequential(
            [keras.Input((4,)), pipelined, keras.layers.Dense(3, name="last")]
        )
        made.compile("adam", "mse")

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        return strategy.run(made.train_step, args=((x, y),))

    with strategy.scope():
        traced = step.get_concrete_function(
            tf.TensorSpec([8, 4]), tf.TensorSpec([8, 3])
        )
    text = tf.mlir.experimental.run_pass_pipeline(
        tf.mlir.experimental.convert_function(traced, pass_pipeline=""),
        "tf-replicated-clustering-bridge-v2",
    )
    (function,) = re.findall(r"func.func private @_func\((.*?)\) ->", text)
    shardings = re.findall(r'mhlo.sharding = "(.*?)"', function)
    # A kernel and a bias with two slots each, [2, 4, 4] and [2, 4].
    assert sum(x.startswith(r"\08\03\1A\03\02\01\01") for x in shardings) == 3
    # The inputs as well are split, along the batch.
    assert sum(x.startswith(r"\08\03\1A\02\02\01") for x in shardings) == 3 + 1
    # A kernel and a bias with two slots each, metrics, iteration, learning rate, ...
    assert shardings.count("") >= 3 + 3


def test_another_number_of_stages_is_refused() -> None:
    strategy = _strategy(4, 1)
    with strategy.scope(), pytest.raises(ValueError, match="num_stages=2 under a str"):
        model([Block(), Block()], num_stages=2, num_microbatches=1)


def test_sums_over_replicas_inside_a_pipeline_are_refused() -> None:
    norm = keras.layers.BatchNormalization
    with _strategy(2, 2).scope():
        layers = [norm(synchronized=True) for _ in range(2)]
        pipelined = tfgpipe.SPMDPipeline(layers, num_stages=2, num_microbatches=1)
        with pytest.raises(ValueError, match="synchronized=True"):
            pipelined.build((4, 3))


def test_other_pipelines_are_refused() -> None:
    strategy = _strategy(2, 1)
    layers = [keras.layers.Dense(4), keras.layers.Dense(4)]
    with strategy.scope(), pytest.raises(ValueError, match="SPMDPipelineStrategy"):
        tfgpipe.PipelinedModel(layers, num_stages=2, num_microbatches=1)
