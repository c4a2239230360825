"""Masks that do not fit the inputs are refused, with what to do."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfgpipe


@pytest.fixture(scope="module")
def pipelined():
    inputs = [keras.Input((5, 8)), keras.Input((8,))]
    hidden = keras.layers.LSTM(8)(inputs[0])
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden + inputs[1]))
    return tfgpipe.PipelinedLayer(model, num_stages=2, num_microbatches=2)


X = [np.ones((4, 5, 8), "float32"), np.ones((4, 8), "float32")]


@pytest.mark.parametrize("shape", [(3, 5), (4, 6), (4, 5, 8, 1), (4, 5, 7)])
def test_a_mask_of_other_sizes_is_refused(pipelined, shape):
    words = rf"mask of shape \({str(shape)[1:-1]}\) for input 0 of shape \(4, 5, 8\)"
    with pytest.raises(ValueError, match=words):
        pipelined(X, mask=[np.ones(shape, bool), None])


def test_a_call_without_inputs_is_refused():
    layers = [keras.layers.Dense(2)]
    pipelined = tfgpipe.PipelinedLayer(layers, num_stages=1, num_microbatches=2)
    with pytest.raises(ValueError, match="Received no tensor among its inputs"):
        pipelined(None)


@pytest.mark.parametrize("masks", [[None], [None] * 3])
def test_a_mask_for_each_input_is_expected(pipelined, masks):
    with pytest.raises(ValueError, match=f"Expected 2; received {len(masks)}"):
        pipelined(X, mask=masks)


def test_a_mask_of_the_first_axes_is_taken(pipelined):
    mask = np.arange(5) < np.array([[5], [3], [2], [1]])
    received = pipelined(X, mask=[mask, None])
    lstm, dense = pipelined.unpipelined().layers[1], pipelined.unpipelined().layers[-1]
    expected = dense(lstm(X[0], mask=mask) + X[1])
    np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)
