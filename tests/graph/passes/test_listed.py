"""Each pass can be left out: results are the same, to rounding."""

from __future__ import annotations

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, joints
from tfgpipe.graph.joint_graph import JointGraph
from tfgpipe.graph.passes import fusion
from tfgpipe.graph.passes.listed import platform_passes
from tfgpipe.stage.joint import trace_joint

ROWS, WIDTH, WIDER = (2, 32), 64, 1024


def body(w, v, low, high):
    """Layers that each pass finds something in."""

    def run(inputs):
        x = tf.raw_ops.BatchMatMulV2(x=inputs[0], y=w.value)
        x = 0.5 * x * tf.math.erfc(-x * 0.7071067811865476)
        quantized = tf.quantization.fake_quant_with_min_max_vars(
            v.value, low.value, high.value
        )
        x = tf.reshape(tf.reshape(x, [-1, WIDER]) @ quantized, [*ROWS, WIDTH])
        x += tf.einsum("abd,adc->abc", tf.einsum("abc,adc->abd", x, x), x) / WIDTH**2
        x = tf.reshape(x, [-1, WIDTH])
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(np.arange(64), x)
        return {0: x + loss[:, None]}

    return run


def name(rewrite):
    function = rewrite.func if isinstance(rewrite, functools.partial) else rewrite
    return function.__name__


def listed(kernels):
    return platform_passes(
        kernels, accumulates=True, chain_cache={} if kernels == "cpu" else None
    )


@functools.cache
def arrays():
    rng = np.random.default_rng(0)
    shapes = (*ROWS, WIDTH), (WIDTH, WIDER), (WIDER, WIDTH), (64, WIDTH)
    x, w, v, dy = (rng.standard_normal(s).astype("float32") for s in shapes)
    w, v = w / np.float32(WIDTH**0.5), v / np.float32(WIDER**0.5)  # As Keras begins.
    # Of constant ranges TensorFlow may round other quotients.
    return [x, w, v, np.float32(-0.1), np.float32(0.09), dy]


def results(passes):
    variables = [keras.Variable(tf.zeros(a.shape)) for a in arrays()[1:-1]]
    joint = trace_joint(
        body(*variables),
        input_specs=[tf.TensorSpec(arrays()[0].shape)],
        weights=variables[:2],
        state=variables[2:],
    )
    for rewrite in passes:
        before, joint = joint, rewrite(joint)
        assert joint != before, f"{name(rewrite)} found nothing"
    return joints.run(joint, *arrays())


@pytest.mark.parametrize(
    ("kernels", "left_out"),
    [(kernels, i) for kernels in ("cpu", "gpu") for i in range(len(listed(kernels)))],
    ids=lambda x: x if isinstance(x, str) else f"{x}",
)
def test_results_without_a_pass_are_the_same(kernels, left_out, monkeypatch):
    monkeypatch.setattr(fusion, "MIN_SAVED_ELEMENTS", 0)
    kept = [x for i, x in enumerate(listed(kernels)) if i != left_out]
    expected, received = results([]), results(kept)
    compare.assert_allclose(received, expected, *compare.TOLERANCES["float32"])


def doubled_kernels(joint: JointGraph) -> JointGraph:
    """A pass of one's own: forwards multiply by twice each kernel."""

    def form(op, inputs):
        a, b = inputs(op)
        is_forward = b.name in joint.given.weights and not op.get_attr("transpose_b")
        return tf.matmul(a, 2.0 * b) if is_forward else None

    return joint.replaced(["MatMul"], form)


def wrapped(joint: JointGraph) -> JointGraph:
    """Another: what a stage makes is negated, by an operation that reads it."""
    (output,) = joint.forward.outputs
    with joint.graph.as_default():
        negated = -joint.graph.get_tensor_by_name(output)
    return joint.rewritten({output: negated.name})


@pytest.mark.parametrize(("own", "factor"), [(doubled_kernels, 2.0), (wrapped, -1.0)])
def test_a_pass_of_ones_own(own, factor):
    """It comes after those of the platform."""

    def layers():
        return [keras.layers.Dense(4, use_bias=False)]

    layer = tfgpipe.PipelinedLayer(layers(), num_stages=1, num_microbatches=2)
    x = np.random.default_rng(0).standard_normal((8, 4)).astype("float32")
    plain = np.asarray(layer(x))
    options = dataclasses.replace(layer.pipeline.options, passes=(own,))
    layer._pipeline = dataclasses.replace(layer.pipeline, options=options)
    np.testing.assert_allclose(layer(x), factor * plain, rtol=1e-6)
