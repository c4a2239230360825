"""Values compressed on their way from stage to stage.

The reference is a plain Keras model with a layer at each boundary that does to its
input, and to the gradient of its output, what the way to another stage does. In double
precision no other difference is large enough to end in another rounding.
"""

from __future__ import annotations

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, train_steps
from tests.helpers.layer_stacks import TRANSFER_DTYPES
from tests.helpers.marks import nightly
from tests.helpers.reference import Crosses, InMicrobatches
from tests.helpers.zoo import floats, padded_ids
from tfgpipe._util import sizes
from tfgpipe.stage import Boundary, codecs

layers = keras.layers
CHOICES = TRANSFER_DTYPES[1:]
RTOL, ATOL = compare.TOLERANCES["float64"]

# -- the reference --------------------------------------------------------------------


def skipping(crosses=lambda x: x):
    """Three stages of 1, 3 and 3 calls; the last reads from both before it."""
    inputs = keras.Input((5,))
    a = layers.Dense(6, activation="tanh")(inputs)
    b = layers.Dense(7, activation="tanh")(crosses(a))
    c = layers.Dense(6, activation="tanh")(layers.Concatenate()([b, inputs]))
    d = layers.Dense(4, activation="tanh")(layers.Add()([crosses(c), crosses(a)]))
    return keras.Model(inputs, layers.Dense(3)(d))


CUT = {"partition": [1, 3, 3]}


def twins(transfer_dtype, make=skipping, **arguments):
    """Returns the plain model with layers at its boundaries, and the pipeline."""
    plain = make(lambda x: Crosses(transfer_dtype)(x))
    compare.fresh_names()
    pipelined = tfgpipe.pipeline(
        make(), transfer_dtype=transfer_dtype, **{**CUT, **arguments}
    )
    rng = np.random.default_rng(0)
    for a, b in zip(plain.variables, pipelined.variables, strict=True):
        a.assign_add(rng.uniform(-0.2, 0.2, a.shape))
        b.assign(a.value)
    return plain, pipelined


def assert_differs(transfer_dtype, plain, x):
    """Asserts that the reference is not one of nothing."""
    exact = skipping()
    compare.copy_state(plain, exact)
    error = np.max(np.abs(plain(x) - exact(x)))
    assert 1e-5 < error < 0.05, transfer_dtype


# -- against the reference ------------------------------------------------------------

LAYOUTS = {"gpipe": 3, "1f1b": 3, "interleaved": 1, "zero_bubble": 3}
TYPES = ("bfloat16", "float16", "int8")


@pytest.mark.parametrize(
    ("schedule", "transfer_dtype"),
    nightly(
        itertools.product(LAYOUTS, TYPES),
        gate=list(zip(LAYOUTS, itertools.cycle(TYPES), strict=False)),
    ),
)
def test_a_step_of_any_schedule_is_that_of_layers_at_the_boundaries(
    schedule, transfer_dtype, floatx
):
    """Interleaved with all stages on one device, where the results are the same."""
    floatx("float64")
    models = twins(
        transfer_dtype,
        num_microbatches=3,
        schedule=schedule,
        devices=[f"CPU:{p}" for p in range(LAYOUTS[schedule])],
    )
    x, y = floats(7, 5).astype("float64"), floats(7, 3, seed=2).astype("float64")
    done = []
    for model in models:
        model.compile(train_steps.Keeps(), loss="mse", metrics=["mae"])
        done.append(train_steps.train(model, x, y, unknown=model is models[1]))
    assert any(np.any(g) for g in done[0].gradients.values())
    train_steps.assert_same(*done, rtol=RTOL, atol=ATOL)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_microbatches_without_rows(schedule, floatx):
    floatx("float64")
    x, y = np.ones((2, 5)), np.ones((2, 3))
    for transfer_dtype in CHOICES:
        plain, pipelined = twins(transfer_dtype, num_microbatches=4, schedule=schedule)
        one_by_one = InMicrobatches(plain, 2)
        one_by_one(x)
        for model in (one_by_one, pipelined):
            model.compile(
                train_steps.Keeps(), loss="mse", run_eagerly=model is one_by_one
            )
        expected = train_steps.train(one_by_one, x, y)
        received = train_steps.train(pipelined, x, y, unknown=True)
        for a, b in zip(
            expected.gradients.values(), received.gradients.values(), strict=True
        ):
            compare.close(a, b, transfer_dtype, RTOL, ATOL)


@pytest.mark.parametrize("transfer_dtype", CHOICES)
def test_stages_compiled_by_xla(transfer_dtype, floatx):
    floatx("float64")
    plain, pipelined = twins(transfer_dtype, num_microbatches=1, jit_compile=True)
    x = np.random.default_rng(1).standard_normal((6, 5))
    compare.assert_runs_the_same(plain, pipelined, x, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_double_is_rounded_alike_whether_or_not_xla_compiles(name):
    x = tf.constant(np.random.default_rng(0).standard_normal(2**20))
    codec = codecs.find(name)
    (encoded,) = codec.encode(x)
    compiled = tf.function(lambda x: codec.encode(x)[0], jit_compile=True)
    np.testing.assert_array_equal(compiled(x), encoded)
    gradient = tf.function(codec.encode_gradient, jit_compile=True)
    np.testing.assert_array_equal(gradient(x), codec.encode_gradient(x))


def test_masks_and_integers_cross_as_they_are(floatx):
    floatx("float64")

    def stack(crosses):
        yield layers.Embedding(11, 6, mask_zero=True)
        yield from crosses()
        yield layers.LSTM(5, return_sequences=True)
        yield from crosses()
        yield layers.GRU(4)
        yield from crosses()
        yield layers.Dense(2)

    x = padded_ids(6, 5)
    for way in ("bfloat16", "int8"):
        plain = keras.Sequential(stack(lambda way=way: [Crosses(way)]))
        plain.build((None, 5))
        layer = tfgpipe.PipelinedLayer(
            list(stack(list)),
            num_stages=4,
            num_microbatches=3,
            transfer_dtype=way,
        )
        layer(x)
        compare.copy_state(plain, layer)
        compare.assert_runs_the_same(plain, layer, x, rtol=RTOL, atol=ATOL)


def two_outputs(crosses=lambda x: x):
    """The first output is read by the second stage, too."""
    inputs = keras.Input((5,))
    a = layers.Dense(6, activation="tanh")(inputs)
    b = layers.Dense(7, activation="tanh")(a)
    c = layers.Dense(3)(crosses(b))
    return keras.Model(inputs, [a, c])


@pytest.mark.parametrize("transfer_dtype", ["bfloat16", "int8"])
def test_outputs_are_never_compressed_nor_is_the_loss_taken_of_less(
    transfer_dtype, floatx
):
    floatx("float64")
    arguments = {"partition": [1, 1, 1], "num_microbatches": 3}
    models = twins(transfer_dtype, two_outputs, schedule="1f1b", **arguments)
    x = np.random.default_rng(1).standard_normal((6, 5))
    compare.assert_same(
        *(compare.run(model, x) for model in models), rtol=RTOL, atol=ATOL
    )
    y = [np.ones((6, 6)), np.ones((6, 3))]
    done = []
    for model in models:
        model.compile(train_steps.Keeps(), loss=["mse", "mae"])
        done.append(train_steps.train(model, x, y))
    train_steps.assert_same(*done, rtol=RTOL, atol=ATOL)


def test_no_compression_is_the_default_and_changes_nothing():
    pipelined = tfgpipe.pipeline(skipping(), num_microbatches=2, **CUT)
    assert pipelined.config.transfer_dtype == codecs.find(None)
    x = floats(4, 5)
    types = {op.type for op in graph_of(pipelined.pipelined, x).get_operations()}
    assert not types & {"Cast", "Round", "Max"}


# -- what crosses ---------------------------------------------------------------------


def graph_of(layer, x):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return tape.gradient(y, x)

    layer(x)
    return tf.function(step).get_concrete_function(tf.TensorSpec(x.shape)).graph


def crossings(layer, graph, there, here):
    """Returns types and shapes of the tensors that one device reads from another.

    Weights, which TensorFlow lets appear at the call of the whole, are left out.
    """
    found = {
        (x.dtype.name, tuple(x.shape))
        for op in graph.get_operations()
        for x in op.inputs
        if op.device.endswith(here) and x.op.device.endswith(there)
    }
    return found - {(w.dtype, tuple(w.shape)) for w in layer.weights}


@pytest.mark.parametrize(
    ("transfer_dtype", "there", "back"),
    [
        (None, {("float32", (4, 6))}, {("float32", (4, 6))}),
        ("bfloat16", {("bfloat16", (4, 6))}, {("bfloat16", (4, 6))}),
        ("float16", {("float16", (4, 6))}, {("float16", (4, 6))}),
        ("int8", {("int8", (4, 6)), ("float32", (4, 1))}, {("float32", (4, 6))}),
        (
            "int8_channel",
            {("int8", (4, 6)), ("float32", (1, 6))},
            {("float32", (4, 6))},
        ),
    ],
)
def test_what_crosses_is_the_compressed_value_and_gradient(transfer_dtype, there, back):
    stack = [layers.Dense(6), layers.Dense(5), layers.Dense(4)]
    layer = tfgpipe.PipelinedLayer(
        stack, num_microbatches=2, transfer_dtype=transfer_dtype, partition=[1, 2]
    )
    graph = graph_of(layer, floats(8, 3))
    assert crossings(layer, graph, "CPU:0", "CPU:1") == there
    # The last stage's device is also where a step begins.
    found = crossings(layer, graph, "CPU:1", "CPU:0")
    assert {x for x in found if x[1] == (4, 6)} == back


def test_the_graph_grows_by_a_few_operations_a_crossing():
    def size(transfer_dtype, num_microbatches):
        stack = [layers.Activation("tanh") for _ in range(6)]
        layer = tfgpipe.PipelinedLayer(
            stack,
            num_stages=3,
            num_microbatches=num_microbatches,
            transfer_dtype=transfer_dtype,
        )
        return len(graph_of(layer, floats(8, 3)).get_operations())

    for way, most in (("bfloat16", 4), ("int8", 20), ("int8_channel", 20)):
        for num_microbatches in (2, 4):
            more = size(way, num_microbatches) - size(None, num_microbatches)
            assert 0 < more <= most * 2 * num_microbatches


# -- a value by itself ----------------------------------------------------------------

SHAPES = [(3, 4), (2, 3, 5), (1, 1), (0, 4), (0, 0), (7,)]


def there(transfer_dtype, x):
    """Returns what arrives of a value."""
    codec, x = codecs.find(transfer_dtype), tf.convert_to_tensor(x)
    spec = tf.TensorSpec(x.shape, x.dtype)
    if not codec.compresses(spec):
        return x
    return codec.decode(codec.encode(x), spec)


@pytest.mark.parametrize("transfer_dtype", TRANSFER_DTYPES)
def test_bytes_are_those_sent_and_what_arrives_is_near(transfer_dtype):
    dtypes = ("float16", "bfloat16", "float32", "float64")
    for shape, dtype in itertools.product(SHAPES, dtypes):
        x = tf.cast(np.random.default_rng(0).standard_normal(shape), dtype)
        codec, spec = codecs.find(transfer_dtype), tf.TensorSpec(shape, dtype)
        sent = codec.encode(x) if codec.compresses(spec) else [x]
        if 0 not in shape:
            total = sum(map(sizes.num_bytes, sent))
            assert Boundary(codec).encoded_bytes({0: spec}) == {0: total}
        arrived = there(transfer_dtype, x)
        assert (arrived.dtype, arrived.shape) == (x.dtype, x.shape)
        largest = np.max(np.abs(np.float64(x)), initial=0.0)
        # Half a step of 127, or the rounding units of both types.
        unit = 2**-8 if "bfloat16" in (transfer_dtype, dtype) else 2**-11
        near = 0.5 / 127 + unit if transfer_dtype in ("int8", "int8_channel") else unit
        error = np.abs(np.float64(arrived) - np.float64(x))
        assert np.all(error <= near * largest * (1 + 1e-6)), (shape, dtype)


@pytest.mark.parametrize(
    ("transfer_dtype", "axes"), [("int8", (1, 2)), ("int8_channel", (0, 1))]
)
def test_steps_are_of_each_example_or_each_channel(transfer_dtype, axes):
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype("float32")
    x *= np.array([1e-3, 1.0, 1e3], "float32")[:, None, None]
    error = np.abs(there(transfer_dtype, x) - x).max(axis=axes)
    np.testing.assert_array_less(error, np.abs(x).max(axis=axes) * (0.501 / 127))


@pytest.mark.parametrize("transfer_dtype", ["int8", "int8_channel"])
def test_nothing_but_zeros_arrives_as_zeros(transfer_dtype):
    np.testing.assert_array_equal(there(transfer_dtype, np.zeros((3, 4))), 0.0)
    mixed = np.array([[0.0, 0.0], [0.0, 5.0]], "float32")
    np.testing.assert_allclose(there(transfer_dtype, mixed), mixed, rtol=1e-6)


@pytest.mark.parametrize("transfer_dtype", ["int8", "int8_channel"])
def test_no_rows_have_scales_that_are_numbers(transfer_dtype):
    for shape in ((0, 4), (0, 0), (0, 3, 4)):
        _, scale = codecs.find(transfer_dtype).encode(tf.zeros(shape))
        assert np.all(np.isfinite(scale))


@pytest.mark.parametrize("transfer_dtype", ["int8", "int8_channel"])
def test_the_smallest_numbers_stay_within_the_steps(transfer_dtype):
    tiny = np.float32(1.4e-45) * np.array([[190.0, -190.0, 3.0]], "float32")
    steps_, _ = codecs.find(transfer_dtype).encode(tf.constant(tiny))
    assert np.all(np.abs(np.int32(steps_)) <= 127)
    assert np.all(np.isfinite(there(transfer_dtype, tiny)))


@pytest.mark.parametrize("transfer_dtype", CHOICES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_overflow_is_not_hidden_from_the_stages_after(transfer_dtype, bad):
    x = np.array([[1.0, bad, 2.0], [1.0, 2.0, 3.0]], "float32")
    arrived = there(transfer_dtype, x).numpy()
    assert not np.isfinite(arrived[0, 1])
    whole = arrived[1] if transfer_dtype != "int8_channel" else arrived[:, ::2]
    assert np.all(np.isfinite(whole))


def test_only_floats_that_get_smaller_are_compressed():
    def packed(transfer_dtype, *dtypes, shape=(4, 3)):
        transfer = Boundary(codecs.find(transfer_dtype), uncompressed=(1,))
        assert not transfer.compresses(1, tf.TensorSpec(shape, "float32"))
        return [transfer.compresses(0, tf.TensorSpec(shape, dtype)) for dtype in dtypes]

    floating = ("float64", "float32", "float16", "bfloat16")
    assert packed("bfloat16", *floating) == [True, True, False, False]
    assert packed("float16", *floating) == [True, True, False, False]
    assert packed("int8", *floating) == [True] * 4
    assert packed("int8", "int32", "bool", "complex64") == [False] * 3
    # A scale would be as large as the number that is all there is in a row.
    assert packed("int8", "float32", shape=(4,)) == [False]
    assert packed(None, *floating) == [False] * 4


# -- plans and configurations ---------------------------------------------------------


@pytest.mark.parametrize(
    ("transfer_dtype", "received"),
    [
        (None, 4 * 8 * 4),
        ("bfloat16", 4 * 8 * 2),
        ("float16", 4 * 8 * 2),
        ("int8", 4 * 8 + 4 * 4),
        ("int8_channel", 4 * 8 + 8 * 4),
    ],
)
def test_a_plan_counts_the_bytes_that_cross(transfer_dtype, received):
    stack = [layers.Dense(8) for _ in range(4)]
    arguments = {"num_stages": 2, "num_microbatches": 2}
    x = floats(8, 8)
    plan = tfgpipe.plan(stack, sample=x, transfer_dtype=transfer_dtype, **arguments)
    assert [stage.received_bytes for stage in plan.stages] == [0, received]
    exact = tfgpipe.plan(stack, sample=x, **arguments)
    assert [s.memory_bytes for s in plan.stages] == [
        s.memory_bytes for s in exact.stages
    ]
    words = f"transfer_dtype={transfer_dtype}, balanced by params"
    assert (words in str(plan)) == (transfer_dtype is not None)
    layer = tfgpipe.PipelinedLayer(stack, transfer_dtype=transfer_dtype, **arguments)
    layer(x)
    assert [s.received_bytes for s in layer.plan().stages] == [0, received]
    again = plan.rebalance([1.0, 1.0])
    assert [s.received_bytes for s in again.stages] == [0, received]


def test_among_equal_cuts_the_one_that_sends_fewest_compressed_bytes_is_taken():
    """A cut behind a cast to half precision sends fewer, unless all are compressed."""

    def stack():
        return [
            layers.Dense(8, use_bias=False),
            layers.Activation("linear", dtype="float16"),
            layers.Dense(8, use_bias=False),
        ]

    def counts(transfer_dtype, build):
        if not build:
            arguments = {"num_stages": 2, "num_microbatches": 1}
            x = floats(4, 8)
            made = tfgpipe.plan(
                stack(), sample=x, transfer_dtype=transfer_dtype, **arguments
            )
            return made.calls_per_stage
        layer = tfgpipe.PipelinedLayer(
            stack(), num_stages=2, num_microbatches=1, transfer_dtype=transfer_dtype
        )
        layer.build((4, 8))
        return tuple(len(stage.segment.calls) for stage in layer.stages)

    for build in (False, True):
        # Cut behind the cast half as much crosses, unless all is made as small.
        assert counts(None, build) == (2, 1)
        assert counts("int8", build) == counts("bfloat16", build) == (1, 2)


@pytest.mark.parametrize("kind", ["layer", "model"])
def test_it_is_saved_and_loaded(kind, tmp_path):
    stack = [layers.Dense(4) for _ in range(3)]
    arguments = {"num_stages": 3, "num_microbatches": 2, "transfer_dtype": "int8"}
    x = floats(4, 4)
    if kind == "layer":
        layer = tfgpipe.PipelinedLayer(stack, **arguments)
        model = keras.Sequential([keras.Input((4,)), layer])
    else:
        model = tfgpipe.PipelinedModel(stack, **arguments)
    before = model(x)
    loaded = compare.reloaded(model, tmp_path)
    inner = loaded.layers[0] if kind == "layer" else loaded.pipelined
    assert inner.config.transfer_dtype == codecs.find("int8")
    np.testing.assert_array_equal(before, loaded(x))


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(tfgpipe.PipelinedLayer, num_stages=2),
        functools.partial(tfgpipe.PipelinedModel, num_stages=2),
        functools.partial(tfgpipe.plan, num_stages=2, sample=np.ones((2, 2))),
    ],
)
def test_another_choice_is_refused(make):
    words = "`transfer_dtype` must be one of None, 'bfloat16', .*Received 'int4'"
    with pytest.raises(ValueError, match=words):
        make([layers.Dense(2)] * 2, num_microbatches=1, transfer_dtype="int4")
