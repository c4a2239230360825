"""The contract of TensorFlow's private annotations for XLA's SPMD partitioner."""

from __future__ import annotations

import re

import numpy as np
import tensorflow as tf

from tests.helpers import fake_tpu
from tfgpipe._compat import sliced_variables, spmd, tf_internals


def _lowered(function, *arguments):
    """Returns the HLO module of a function, as text."""
    compiled = tf.function(function, jit_compile=True, autograph=False)
    return compiled.experimental_get_compiler_ir(*arguments)(stage="hlo")


def _shardings(text, target):
    return re.findall(
        rf'custom_call_target="{target}", sharding={{(.*?)}},? ', text + " "
    )


def test_annotations_arrive_in_the_module():
    x = tf.zeros([2, 4, 3])
    text = _lowered(lambda x: spmd.split(x, num_parts=2, axis=1) + 1, x)
    assert _shardings(text, "Sharding") == ["devices=[1,2,1]0,1"]
    text = _lowered(lambda x: spmd.replicate(x) + 1, x)
    assert _shardings(text, "Sharding") == ["replicated"]


def test_between_entering_and_leaving_a_core_has_its_part():
    shapes = []

    def function(x):
        row = spmd.enter_manual(x, num_parts=2)
        shapes.append(row.shape)
        return spmd.leave_manual(row * 2, num_parts=2)

    text = _lowered(function, tf.zeros([4, 3]))
    assert shapes[0] == [2, 3]
    assert re.search(r"multiply\(f32\[2,3\]", text)
    assert _shardings(text, "SPMDFullToShardShape") == ["manual"]
    assert _shardings(text, "SPMDShardToFullShape") == ["devices=[2,1]0,1"]


def test_gradients_enter_where_values_leave():
    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            row = spmd.enter_manual(spmd.split(x, num_parts=2), num_parts=2)
            y = spmd.leave_manual(row**2, num_parts=2)
        return tape.gradient(y, x)

    text = _lowered(function, tf.zeros([2, 3]))
    assert len(_shardings(text, "SPMDFullToShardShape")) == 2


def test_arguments_are_split_and_so_are_the_results_in_their_place():
    variable = tf.Variable(tf.zeros([4, 3]))

    def function(x):
        variable.assign_add(x)
        return tf.reduce_sum(x)

    compiled = tf.function(function, jit_compile=True, autograph=False)
    x = tf.ones([4, 3])
    module = compiled.experimental_get_compiler_ir(x)(stage="hlo_serialized")
    assert spmd.argument_shardings(module) == [[], []]
    assert spmd.updated_arguments(module) == {1: 1}
    module = spmd.with_split_arguments(module, [1], num_parts=2)
    assert spmd.argument_shardings(module) == [[], [2, 1]]
    assert spmd.updated_arguments(module) == {1: 1}
    assert module.count(b"\x02\x01")  # The tiles of the argument and of the result.


def test_a_strategy_for_tpus_splits_what_it_is_told_and_its_slots():
    strategy = tf.distribute.TPUStrategy(
        fake_tpu.Resolver(2),
        experimental_device_assignment=tf.tpu.experimental.DeviceAssignment(
            fake_tpu.Topology((2, 1, 1, 1)), np.array([[[0, 0, 0, 0], [1, 0, 0, 0]]])
        ),
        experimental_spmd_xla_partitioning=True,
    )
    splits = []
    sliced_variables.split_variables(
        strategy, num_parts=2, is_split=lambda: bool(splits)
    )
    with strategy.scope():
        whole = tf.Variable(tf.zeros([2, 3]))
        splits.append(True)
        split = tf.Variable(lambda: tf.reshape(tf.range(6.0), [2, 3]))
        splits.clear()
        with strategy.extended.colocate_vars_with(split):
            slot = tf.Variable(tf.zeros([2, 3]))
            scalar = tf.Variable(tf.zeros([]))
    received = [
        sliced_variables.is_split_variable(v) for v in (whole, split, slot, scalar)
    ]
    assert received == [False, True, True, False]
    assert split.shape == [2, 3]
    np.testing.assert_array_equal(split.numpy(), [[0, 1, 2], [3, 4, 5]])
    for k, row in enumerate(split.values[0]):
        np.testing.assert_array_equal(row.numpy(), [[3 * k, 3 * k + 1, 3 * k + 2]])


def test_variables_on_the_host_are_plain_whatever_strategy_there_is():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        with tf_internals.host_variables():
            plain = tf.Variable(1.0)
        mirrored = tf.Variable(1.0)
    assert not hasattr(plain, "values")
    assert plain.device.endswith("CPU:0")
    assert len(mirrored.values) == 2
