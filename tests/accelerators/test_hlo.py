"""HLO modules of traced functions, and what has none."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from tests.helpers.traced_stages import dense, traced
from tfgpipe.accelerators.hlo import UnsupportedOp, UnsupportedOpError, hlo

VECTOR = tf.TensorSpec([4])


@pytest.mark.parametrize("name", ["forward", "backward", "finalize"])
def test_functions_of_a_stage_for_tpus_have_a_module(name):
    _, stage = traced(dense(), platform="tpu", num_microbatches=2)
    function = getattr(stage.with_remat, name).function
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in function.graph.inputs]
    products = {"forward": b"MatMul", "backward": b"MatMul", "finalize": b"call"}
    assert products[name] in hlo(function, *specs)


def test_in_place_accumulation_has_none():
    """Functions that TensorFlow runs add gradients to the accumulator's own buffer."""
    _, stage = traced(dense(), platform="gpu", num_microbatches=2)
    function = stage.with_remat.backward.function
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in function.graph.inputs]
    with pytest.raises(UnsupportedOpError, match="InplaceAdd"):
        hlo(function, *specs)


def test_captured_variables_are_arguments():
    with tf.device("CPU:1"):
        weight = keras.Variable([1.0, 2.0, 3.0, 4.0])
    alone = hlo(lambda x: x * 2.0, VECTOR)
    assert hlo(lambda x: x * weight.value, VECTOR) != alone


def test_tensors_are_taken_by_value_if_a_shape_depends_on_them():
    def function(x, size):
        return tf.reshape(x, [size, -1])

    assert hlo(function, tf.ones([4]), tf.constant(2))
    with pytest.raises(ValueError, match="must be a compile-time constant"):
        hlo(function, VECTOR, tf.TensorSpec([], tf.int32))


def test_what_xla_lacks_is_named_with_its_layer():
    @tf.function(autograph=False)
    def function(x):
        with tf.name_scope("decoder/reader"):
            return tf.strings.length(tf.strings.as_string(x))

    with pytest.raises(
        UnsupportedOpError, match="AsString of layer 'decoder/reader'"
    ) as error:
        hlo(function, VECTOR)
    assert (
        UnsupportedOp("AsString", "decoder/reader/AsString") in error.value.operations
    )


def test_an_open_dimension_is_refused():
    with pytest.raises(ValueError, match=r"argument 1 of shape \(None, 4\)"):
        hlo(tf.add, VECTOR, tf.TensorSpec([None, 4]))
