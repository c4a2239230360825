"""Numbers of files of integers, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfgpipe.quantization import tflite


def test_integers_are_steps_from_the_zero_point():
    tensor = tflite.Tensor("x", np.dtype(np.int8), 0.5, 3)
    given = np.array([0.0, 1.2, -1.3, 100.0, -100.0])
    integers = tensor.quantize(given)
    assert integers.dtype == np.int8
    assert integers.tolist() == [3, 5, 0, 127, -128]
    assert tensor.dequantize(integers).tolist() == [0, 1, -1.5, 62, -65.5]


def test_a_tensor_that_is_not_quantized_stays_as_it_is():
    tensor = tflite.Tensor("x", np.dtype(np.float32), 0.0, 0)
    given = np.array([1.25, -300.0])
    assert tensor.quantize(given).dtype == np.float32
    np.testing.assert_array_equal(tensor.dequantize(tensor.quantize(given)), given)


OUTPUTS = np.array([[0.1, 0.9], [0.3, 0.7], [0.8, 0.2]])


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([1, 0, 0], [True, False, True]),
        ([[1], [0], [0]], [True, False, True]),
        ([[0, 1], [1, 0], [1, 0]], [True, False, True]),
        ([1, 0], None),
    ],
)
def test_which_classes_are_right(labels, expected):
    found = tflite._right_classes(np.array(labels), OUTPUTS)
    assert (None if found is None else found.tolist()) == expected


def test_one_output_is_no_class():
    assert tflite._right_classes(np.zeros((3, 1)), OUTPUTS[:, :1]) is None


def test_examples_come_in_small_batches_from_arrays_and_datasets():
    x, y = np.arange(5), np.arange(10).reshape(5, 2)
    data = tf.data.Dataset.from_tensor_slices({"a": x, "b": y}).batch(4)
    for given, sizes in (({"a": x, "b": y}, [3, 2]), (data, [3, 1, 1])):
        found = list(tflite.batches(given, size=3))
        assert [len(batch[0]) for batch in found] == sizes
        for k, whole in enumerate((x, y)):
            joined = np.concatenate([batch[k] for batch in found])
            np.testing.assert_array_equal(joined, whole)


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model/dense_1/MatMul;other/Add", "dense"), ("model/other/dense", "")],
)
def test_an_operation_is_of_the_innermost_layer_in_its_name(name, layer):
    assert tflite.layer_of(name, {"dense"}) == layer
