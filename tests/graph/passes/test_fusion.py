"""Which operations are fused into chains, and that these compute the same."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

import tfgpipe
from tests.helpers import compare, joints
from tfgpipe.graph.passes import fusion
from tfgpipe.stage.joint import trace_joint


class Fused:
    """A function and its gradients as a joint graph, with its chains fused.

    Attributes:
        found: What replaces what.
        chains: For each function of a chain, the types of its operations.
    """

    def __init__(self, function, *specs, weights=(), least=0):
        self.cache = {}
        variables = [keras.Variable(tf.zeros(w.shape), dtype=w.dtype) for w in weights]
        self.plain = trace_joint(
            lambda inputs: {0: function(*inputs, *(v.value for v in variables))},
            input_specs=specs,
            weights=variables,
            state=[],
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fusion, "MIN_SAVED_ELEMENTS", least)
            self.fused = fusion.fuse_chains(self.plain, cache=self.cache)
        self.found = self.fused.forms
        self.graph = self.plain.graph
        (self.result,) = self.plain.forward.outputs
        self.chains = [
            sorted(
                op.type
                for op in chain.graph.get_operations()
                if op.type not in ("Const", "Identity", "Placeholder", "NoOp")
            )
            for chain in self.cache.values()
        ]
        self.num_outputs = [len(chain.outputs) for chain in self.cache.values()]

    def assert_same(self, *arrays, rtol=1e-6, atol=1e-6):
        """Asserts that results are those of the operations by themselves."""
        plain, fused = (
            joints.run(joint, *arrays) for joint in (self.plain, self.fused)
        )
        compare.assert_allclose(fused, plain, rtol=rtol, atol=atol)


def spec(*shape, dtype=tf.float32):
    return tf.TensorSpec(shape, dtype)


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype("float32") for shape in shapes]


def gelu(x):
    return 0.5 * x * tf.math.erfc(-x * 0.7071067811865476)


def normalized(x):
    mean = tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(x, mean), -1, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def test_forward_and_gradient_are_a_chain_each_between_products():
    fused = Fused(
        lambda x, w, v: tf.matmul(gelu(tf.matmul(x, w)), v),
        spec(4, 8),
        weights=[spec(8, 16), spec(16, 8)],
    )
    forward, gradient = fused.chains
    assert forward.count("Erfc") == 1
    assert "Exp" not in forward
    # It computes again what it reads of the forward, which so returns one tensor.
    assert gradient.count("Erfc") == gradient.count("Exp") == 1
    assert fused.num_outputs == [1, 1]
    assert not {"MatMul"} & {*forward, *gradient}
    fused.assert_same(*arrays((4, 8), (8, 16), (16, 8), (4, 8)))


def test_short_results_are_passed_to_the_gradient():
    fused = Fused(
        lambda x, w: tf.matmul(normalized(x), w), spec(8, 32), weights=[spec(32, 4)]
    )
    forward, gradient = fused.chains
    assert forward.count("Mean") == 2
    assert "Mean" not in gradient
    # The result, the mean of each row, and one over its deviation.
    assert fused.num_outputs[0] == 3
    fused.assert_same(*arrays((8, 32), (32, 4), (8, 4)))


def test_a_chain_never_waits_for_itself():
    """Two ways lead from the first operations to the last: one has a product in it."""

    def function(x, w):
        y = tf.tanh(x) * 2.0
        return tf.exp(y + tf.matmul(y, w)) * 0.1

    fused = Fused(function, spec(4, 8), weights=[spec(8, 8)])
    forward = [chain for chain in fused.chains if "TanhGrad" not in chain][:2]
    assert ["Exp" in chain for chain in forward] == [False, True]
    fused.assert_same(*(0.1 * a for a in arrays((4, 8), (8, 8), (4, 8))))


def test_equal_chains_share_one_function():
    def function(x, w):
        for _ in range(3):
            x = tf.matmul(gelu(x), w)
        return x

    fused = Fused(function, spec(4, 8), weights=[spec(8, 8)])
    assert len(fused.cache) == 2
    calls = {name for name in fused.found.values() if name[0] == "^"}
    assert len(calls) == 6
    fused.assert_same(*arrays((4, 8), (8, 8), (4, 8)))


def test_an_operation_waits_for_the_chain_of_one_that_it_waits_for():
    def function(x, w):
        y = tf.tanh(x) * 2.0
        with tf.control_dependencies([y]):
            z = tf.matmul(x, w)
        return z + y * 3.0

    fused = Fused(function, spec(4, 8), weights=[spec(8, 8)])
    product = next(op for op in fused.graph.get_operations() if op.type == "MatMul")
    (before,) = (f"^{op.name}" for op in product.control_inputs)
    assert fused.found[before].startswith("^PartitionedCall")
    fused.assert_same(*arrays((4, 8), (8, 8), (4, 8)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), tf.ones([8]))),
        lambda x, w: tf.matmul(x, tf.tanh(w) * 2.0),  # Once a step, not a microbatch.
        lambda x, w: tf.nn.softmax(tf.matmul(x, w)),
        lambda x, w: tf.tanh(tf.matmul(x, w)),  # A single operation.
    ],
)
def test_what_gains_nothing_is_left(function):
    fused = Fused(function, spec(4, 8), weights=[spec(8, 8)])
    assert fused.result not in fused.found
    fused.assert_same(*arrays((4, 8), (8, 8), (4, 8)))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((None, 8), tf.float32), ((4, 8), tf.bfloat16)]
)
def test_unknown_shapes_and_half_precision_are_left(shape, dtype):
    fused = Fused(lambda x: tf.exp(tf.tanh(x) * x), spec(*shape, dtype=dtype))
    assert not fused.found


def test_a_chain_that_saves_too_little_is_not_fused():
    """It saves the writing of three results of 32 numbers."""

    def function(x):
        return tf.exp(tf.tanh(tf.abs(x)) * x)

    assert Fused(function, spec(4, 8), least=3 * 32).found
    forward = Fused(function, spec(4, 8), least=3 * 32 + 1)
    assert forward.result not in forward.found


@pytest.mark.parametrize("op", sorted(fusion._FUSED))
def test_xla_has_every_operation_on_cpus(op):
    """Its kernels are registered once it compiles; it refuses what has none."""
    tf.function(tf.identity, jit_compile=True)(tf.zeros([]))
    registered = kernels.get_registered_kernels_for_op(op).kernel
    assert "XLA_CPU_JIT" in {kernel.device_type for kernel in registered}


def test_nothing_is_fused_without_xla_for_cpus(monkeypatch):
    """As with `tensorflow-tpu`."""

    def refuse(*_args, **_kwargs):
        raise tf.errors.NotFoundError(None, None, "could not find platform Host")

    fusion.has_xla.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(tf, "function", lambda *_args, **_kwargs: refuse)
        assert not fusion.has_xla()
    assert not Fused(lambda x: tf.exp(tf.tanh(x) * x), spec(4, 8)).found
    fusion.has_xla.cache_clear()
    assert Fused(lambda x: tf.exp(tf.tanh(x) * x), spec(4, 8)).found


def test_long_chains_are_fused():
    def function(x):
        for _ in range(1200):
            x = tf.tanh(x) * x
        return x

    fused = Fused(function, spec(2))
    assert fused.chains[0].count("Tanh") == 1200


@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
def test_a_pipeline_fuses_large_layers_and_trains_as_the_plain_model(remat):
    def layers():
        return [
            keras.layers.LayerNormalization(),
            keras.layers.Dense(256, activation="gelu"),
            keras.layers.Dropout(0.0),
            keras.layers.Dense(64),
        ]

    x = np.random.default_rng(0).standard_normal((512, 2, 64)).astype("float32")
    plain = keras.Sequential([keras.Input(x.shape[1:]), *layers()])
    compare.fresh_names()
    layer = tfgpipe.PipelinedLayer(
        layers(), num_stages=2, num_microbatches=2, remat=remat
    )
    pipelined = keras.Sequential([keras.Input(x.shape[1:]), layer])
    pipelined.set_weights(plain.get_weights())
    compare.assert_runs_the_same(plain, pipelined, x, rtol=1e-5, atol=1e-5)
    chains = layer.pipeline.stages[0]._cache.chains
    assert len(chains) == 3
    without = tfgpipe.PipelinedLayer(
        layers(), num_stages=2, num_microbatches=2, jit_compile=False
    )
    compare.run(keras.Sequential([keras.Input(x.shape[1:]), without]), x)
    assert not without.pipeline.stages[0]._cache.chains


def test_a_chain_that_reads_a_condition_has_a_gradient_in_eager_mode(monkeypatch):
    """TensorFlow asks for one of the operation that computes the condition."""
    monkeypatch.setattr(fusion, "MIN_SAVED_ELEMENTS", 0)

    def where_finite(x):
        finite = keras.ops.all(keras.ops.isfinite(x))
        return keras.ops.where(finite, keras.ops.tanh(x) * x, x)

    def layers():
        return [
            keras.layers.Dense(6),
            keras.layers.Activation(where_finite),
            keras.layers.Dense(6),
        ]

    x = np.random.default_rng(0).standard_normal((4, 6)).astype("float32")
    plain = keras.Sequential([keras.Input(x.shape[1:]), *layers()])
    compare.fresh_names()
    layer = tfgpipe.PipelinedLayer(
        layers(), num_stages=1, num_microbatches=1, remat="none"
    )
    pipelined = keras.Sequential([keras.Input(x.shape[1:]), layer])
    pipelined.set_weights(plain.get_weights())
    compare.assert_runs_the_same(plain, pipelined, x, graph=False, rtol=1e-5, atol=1e-5)
    assert layer.pipeline.stages[0]._cache.chains


def test_equal_chains_of_which_others_read_other_results_share_no_function():
    """Two chains of the same operations: products read one, then the other of them."""

    def half(x, y, w, v):
        first = tf.tanh(tf.matmul(x, w) + tf.matmul(y, v))
        second = tf.sin(first)
        return first, second, tf.exp(second)

    def function(x, w, v):
        first, _, last = half(x, x, w, v)
        _, second, last = half(first, last, w, v)
        return tf.matmul(second, w) + tf.matmul(last, v)

    fused = Fused(function, spec(4, 8), weights=[spec(8, 8), spec(8, 8)])
    equal = sorted(["AddV2", "Exp", "Sin", "Tanh"])
    assert fused.chains.count(equal) == 2
    fused.assert_same(*arrays((4, 8), (8, 8), (8, 8), (4, 8)), rtol=1e-5, atol=1e-5)
