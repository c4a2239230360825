"""What TensorFlow and Keras do that code relies on and that no other test would notice.

Each is an entry of `docs/contributing/facts.md`. If one fails after an upgrade, the
behaviour has changed: see there which code can then be simpler.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

import tfgpipe
from tests.helpers.subprocesses import interpret
from tests.helpers.traced_functions import executed_calls, traced
from tfgpipe._compat import functions
from tfgpipe._compat.kernels import kernel_for

VECTOR = tf.TensorSpec([2])


def test_grappler_copies_a_function_for_each_call_with_a_constant_argument():
    """Hence the number of rows is an argument only where it can be zero."""
    scale = functions.trace_function(
        lambda x, n: [x * tf.cast(n, x.dtype)],
        [VECTOR, tf.TensorSpec([], tf.int32)],
        name="scale",
    )
    x, n = tf.ones([2]), tf.constant(3)
    constant = traced(
        lambda x: [*scale(x, tf.constant(3)), *scale(x, tf.constant(3))], VECTOR
    )
    assert len(set(executed_calls(constant, x))) == 2
    argument = traced(
        lambda x, n: [*scale(x, n), *scale(x, n + 1)],
        VECTOR,
        tf.TensorSpec([], tf.int32),
    )
    assert len(set(executed_calls(argument, x, n))) == 1


@pytest.mark.parametrize("here", [True, False])
def test_an_import_maps_inputs_to_tensors_of_the_same_graph_alone(here):
    """Hence `GraphSource.extract` puts an `identity` on each input."""
    graph_def = traced(lambda x: tf.sin(x, name="sine"), VECTOR).graph.as_graph_def()
    (argument,) = [node.name for node in graph_def.node if node.op == "Placeholder"]

    def trace(x):
        def branch():
            mapped = {f"{argument}:0": tf.identity(x) if here else x}
            return tf.graph_util.import_graph_def(
                graph_def, input_map=mapped, return_elements=["sine:0"], name=""
            )[0]

        return tf.cond(x[0] > 0.0, branch, lambda: x)

    if here:
        traced(trace, VECTOR)
    else:
        with pytest.raises(ValueError, match="does not exist in graph"):
            traced(trace, VECTOR)


@pytest.mark.parametrize(("timeout_seconds", "num_threads"), [(0.0, 0), (3.0, 8)])
def test_a_collective_with_a_timeout_leaves_a_thread(timeout_seconds, num_threads):
    """Hence `ReplicaGroup` has no timeout."""
    tokens = []
    for device in ("CPU:0", "CPU:1"):
        with tf.device(device):
            tokens.append(tf.Variable(0.0))

    @tf.function(autograph=False)
    def step():
        return [
            tf.raw_ops.CollectiveReduceV2(
                input=tf.ones([2]),
                group_size=2,
                group_key=990_000 + num_threads,
                instance_key=i,
                ordering_token=[token.handle],
                merge_op="Add",
                final_op="Id",
                timeout_seconds=timeout_seconds,
            )
            for i in range(4)
            for token in tokens
        ]

    step()
    before = len(os.listdir("/proc/self/task"))
    step()
    assert len(os.listdir("/proc/self/task")) >= before + num_threads
    if not num_threads:
        assert len(os.listdir("/proc/self/task")) < before + 8


def test_xla_compiles_no_collective():
    """Hence stages that hold one are not compiled."""

    @tf.function(jit_compile=True)
    def compiled(x):
        return tf.raw_ops.CollectiveReduceV2(
            input=x,
            group_size=1,
            group_key=990_100,
            instance_key=0,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )

    with pytest.raises(tf.errors.UnimplementedError, match="Collectives"):
        compiled(tf.ones([2]))


@pytest.mark.parametrize(("num_devices", "is_right"), [(2, True), (3, False)])
def test_hierarchical_copies_of_an_odd_number_of_replicas_are_wrong(
    num_devices, is_right
):
    """Hence `all_reduce` has no such choice."""
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_devices)],
        cross_device_ops=tf.distribute.HierarchicalCopyAllReduce(),
    )

    @tf.function
    def step():
        def replica():
            context = tf.distribute.get_replica_context()
            index = tf.cast(context.replica_id_in_sync_group, tf.float32)
            return context.all_reduce("sum", tf.ones([3]) * (index + 1.0))

        return strategy.run(replica)

    found = strategy.experimental_local_results(step())[0].numpy()
    right = num_devices * (num_devices + 1) / 2
    assert (found == right).all() == is_right


def test_keras_distributes_no_variable_over_devices():
    """Hence tensor-parallel layers place the shards of their weights themselves."""
    tfgpipe.make_logical_cpus(8)
    mesh = keras.distribution.DeviceMesh((2,), ["model"], ["cpu:0", "cpu:1"])
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["kernel"] = (None, "model")
    with keras.distribution.ModelParallel(layout_map=layout_map).scope():
        dense = keras.layers.Dense(4)
        dense.build((None, 2))
    assert dense.kernel.value.shape == (2, 4)
    assert dense.kernel.value.device.endswith("CPU:0")


def test_a_graph_may_divide_by_a_constant_as_it_multiplies_by_the_inverse():
    """Hence `transfer_dtype="int8"` multiplies in the first place."""
    x = tf.constant(np.random.default_rng(0).random(4096), tf.float32)
    divided = tf.function(lambda x: x / 127.0)(x)
    np.testing.assert_array_equal(divided, x * (1.0 / 127.0))
    assert np.any(x / 127.0 != divided)


def test_the_wheel_says_which_arguments_gpus_take_from_the_host():
    registered = kernels.get_registered_kernels_for_op("FakeQuantWithMinMaxVars").kernel
    (gpu,) = [kernel for kernel in registered if kernel.device_type == "GPU"]
    assert sorted(gpu.host_memory_arg) == ["max", "min"]


@pytest.mark.parametrize(
    ("op", "types", "in_host_memory"),
    [
        ("AddV2", {"T": tf.int32}, ["x", "y", "z"]),
        ("SelectV2", {"T": tf.int32}, []),
        ("Cast", {"SrcT": tf.int64, "DstT": tf.int32}, []),
        ("StatelessRandomGetKeyCounter", {}, ["counter", "key", "seed"]),
        ("InplaceAdd", {"T": tf.float32}, []),
        ("Empty", {"dtype": tf.int32}, ["shape"]),
    ],
)
def test_kernels_of_gpus_have_integers_in_one_memory_or_the_other(
    op, types, in_host_memory
):
    node = tf.compat.v1.NodeDef(op=op)
    for name, dtype in types.items():
        node.attr[name].type = dtype.as_datatype_enum
    kernel = kernel_for(node, "GPU")
    assert sorted(kernel.host_arguments) == in_host_memory


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_xla_draws_other_random_numbers_but_in_float16(dtype):
    def draw():
        return tf.random.stateless_uniform([100], [1, 2], dtype=dtype)

    by_xla = tf.function(draw, jit_compile=True)()
    assert bool(tf.reduce_all(draw() == by_xla)) == (dtype == "float16")


def test_onednn_is_on_by_default_where_the_processor_has_vnni():
    """Hence a comparison to the last bit needs `TF_ENABLE_ONEDNN_OPTS`."""
    flags = re.search(r"flags\s*:(.*)", Path("/proc/cpuinfo").read_text())
    # TensorFlow 2.20 leaves this line out at 3, and 2.21 does not.
    run = interpret(
        "import tensorflow",
        without={"TF_ENABLE_ONEDNN_OPTS"},
        TF_CPP_MIN_LOG_LEVEL="0",
    )
    is_on = "oneDNN custom operations are on" in run.stderr
    assert is_on == bool(flags and "avx512_vnni" in flags[1].split())
