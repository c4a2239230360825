"""Half precision in a pipeline: types, sums and loss scaling are plain Keras'.

A number is known to `UNIT`, the rounding unit of its type, and what is a sum over rows
or positions to a few of these: microbatches add up other partial sums, each rounded.
"""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.marks import nightly
from tests.helpers.reference import InMicrobatches
from tests.helpers.zoo import floats
from tfgpipe import schedules
from tfgpipe.capture import dtype_policies

layers = keras.layers

POLICIES = ("mixed_float16", "mixed_bfloat16")
UNIT = {"mixed_float16": 2**-10, "mixed_bfloat16": 2**-7}
COMPUTE = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


# -- types ----------------------------------------------------------------------------


class Notes(layers.Layer):
    """The identity, casting nothing; notes the type of what it is given."""

    def __init__(self, number, seen):
        super().__init__(autocast=False, name=f"notes_{number}")
        # Not the dictionary itself, of which Keras would make one of its own.
        self.note = lambda dtype: seen.setdefault(number, set()).add(dtype)

    def call(self, x):
        if isinstance(x, tf.Tensor):
            self.note(x.dtype.name)
        return x


class Block(layers.Layer):
    """Makes some of its layers at once, and some when it is built."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(2, 3)

    def build(self, shape):
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.late = layers.Dense(shape[-1], activation="gelu")
        self.late.build(shape)

    def call(self, x):
        y = self.norm(x)
        return x + self.late(self.attention(y, y))


def noted(seen, given=None):
    """Layers of all kinds, the type that each returns noted."""
    own = {} if given is None else {"dtype": given}
    stack = [
        layers.Dense(6, activation="tanh", **own),
        layers.LayerNormalization(**own),
        layers.Conv1D(6, 3, padding="same", **own),
        layers.Dense(6, dtype="float32"),
        layers.MultiHeadAttention(2, 3, **own),
        layers.LSTM(5, return_sequences=True, **own),
        layers.Dense(4, **own),
    ]
    stack[4] = Itself(stack[4])
    return [x for i, layer in enumerate(stack) for x in (layer, Notes(i, seen))]


class Itself(layers.Wrapper):
    """Attention of a sequence to itself, as one layer of a stack."""

    def build(self, shape):
        self.layer.build(shape, shape)

    def call(self, x):
        return self.layer(x, x)


@pytest.mark.parametrize(
    ("policy", "how", "num_stages", "num_microbatches"),
    [
        ("mixed_float16", "global", 2, 3),
        ("mixed_bfloat16", "layer", 3, 2),
        ("mixed_float16", "dtype", 2, 1),
        *nightly(
            [
                ("mixed_bfloat16", "global", 4, 1),
                ("mixed_float16", "layer", 1, 3),
                ("mixed_bfloat16", "dtype", 3, 4),
            ]
        ),
    ],
)
def test_every_layer_computes_in_the_type_it_has_unpipelined(
    policy, how, num_stages, num_microbatches
):
    x = floats(6, 4, 6)
    arguments = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    given = policy if how == "layer" else None
    seen: dict[str, dict] = {"plain": {}, "pipelined": {}}
    with dtype_policies.default_policy_scope("float32" if how == "layer" else policy):
        plain = keras.Sequential([keras.Input((4, 6)), *noted(seen["plain"], given)])
    compare.fresh_names()
    with dtype_policies.default_policy_scope(policy if how == "global" else "float32"):
        layer = tfgpipe.PipelinedLayer(
            noted(seen["pipelined"], given),
            dtype=policy if how == "dtype" else None,
            **arguments,
        )
        layer.build((None, 4, 6))
    compare.copy_state(plain, layer)
    for some in seen.values():
        some.clear()
    expected, received = (
        compare.run(plain, x, graph=False),
        compare.run(layer, x),
    )
    half = COMPUTE[policy]
    assert seen["plain"] == seen["pipelined"]
    assert [seen["plain"][i] for i in range(4)] == [{half}] * 3 + [{"float32"}]
    assert received.outputs.dtype == half
    assert {w.dtype for w in layer.weights} == {"float32"}
    assert {g.dtype.name for g in received.weight_grads.values()} == {"float32"}
    tolerance = 8 * UNIT[policy]
    compare.assert_same(expected, received, rtol=tolerance, atol=tolerance)
    # The same layers without the pipeline are the reference with the same types.
    assert layer.unpipelined()(x).dtype == half


@pytest.mark.parametrize("policy", POLICIES)
def test_stages_hand_over_in_half_precision_and_add_up_in_single(policy):
    stack = [layers.Dense(6) for _ in range(4)]
    layer = tfgpipe.PipelinedLayer(
        stack, num_stages=2, num_microbatches=3, dtype=policy
    )
    x = tf.constant(floats(6, 5))
    layer(x)
    traced = layer.pipeline.begin(
        layer.pipeline.flatten_inputs(x, {}),
        schedule=schedules.gpipe(2, 3),
        training=True,
        outputs=(),
        per_step={},
    ).traced
    for stage in traced:
        sums = stage.with_remat.accumulation.specs
        assert len(sums) == 4
        assert {spec.dtype for spec in sums} == {tf.float32}
        assert [s.dtype.name for s in stage.output_specs.values()] == [COMPUTE[policy]]
    second = traced[1].trace
    for name in (*second.given.inputs, *second.backward.input_grads):
        assert second.spec(name).dtype.name == COMPUTE[policy]


def test_a_layer_of_ones_own_is_tried_for_mixing_rows_in_half_precision():
    """Casts of weights that last for a step were missing there."""

    class Wide(layers.Layer):
        def build(self, shape):
            self.inner = layers.Dense(8)
            self.inner.build(shape)

        def call(self, x):
            return self.inner(x)

    with dtype_policies.default_policy_scope("mixed_bfloat16"):
        layer = tfgpipe.PipelinedLayer(
            [Wide(), Wide()], num_stages=2, num_microbatches=2
        )
        assert layer(np.ones((4, 8), "float32")).dtype == tf.bfloat16


# -- a policy for a pipeline ----------------------------------------------------------


def policies_in(layer):
    return {inner.dtype_policy.name for inner in layer._flatten_layers()}


def test_a_policy_reaches_layers_in_layers_but_none_with_one_of_its_own():
    own = layers.Dense(6, dtype="float32")
    stack = [
        Block(),
        layers.MultiHeadAttention(2, 3, name="attention"),
        keras.Sequential([layers.Dense(6), layers.Dropout(0.1)]),
        layers.RNN([layers.GRUCell(6), layers.LSTMCell(6)], return_sequences=True),
        own,
        layers.Dense(2),
    ]
    stack[1] = Itself(stack[1])
    layer = tfgpipe.PipelinedLayer(
        stack, num_stages=2, num_microbatches=2, dtype="mixed_bfloat16"
    )
    assert layer(floats(4, 3, 6)).dtype == tf.bfloat16
    for inner in stack:
        expected = "float32" if inner is own else "mixed_bfloat16"
        assert policies_in(inner) == {expected}, inner.name
    assert keras.config.dtype_policy().name == "float32"


def test_without_a_policy_layers_stay_as_they_are():
    with dtype_policies.default_policy_scope("mixed_bfloat16"):
        stack = [Block(), layers.Dense(4, dtype="float32")]
        layer = tfgpipe.PipelinedLayer(stack, num_stages=2, num_microbatches=2)
        layer.build((None, 3, 6))
    assert policies_in(stack[0]) == {"mixed_bfloat16"}
    assert policies_in(stack[1]) == {"float32"}
    assert layer.get_config()["dtype"] is None


def test_built_layers_whose_weights_stay_take_a_policy():
    stack = [layers.Dense(4), layers.Dense(3)]
    keras.Sequential([keras.Input((5,)), *stack])
    layer = tfgpipe.PipelinedLayer(
        stack, num_stages=2, num_microbatches=2, dtype="mixed_float16"
    )
    assert layer(floats(4, 5)).dtype == tf.float16


@pytest.mark.parametrize("face", [tfgpipe.PipelinedLayer, tfgpipe.PipelinedModel])
def test_a_policy_is_saved_and_loaded(face, tmp_path):
    stack = [layers.Dense(6), layers.Dense(6, dtype="float32"), layers.Dense(4)]
    made = face(stack, num_stages=2, num_microbatches=2, dtype="mixed_bfloat16")
    model = made
    if face is tfgpipe.PipelinedLayer:
        model = keras.Sequential([keras.Input((5,)), made])
    x = floats(4, 5)
    expected = model(x)
    model.save(tmp_path / "model.keras")
    with dtype_policies.default_policy_scope(
        "mixed_float16"
    ):  # Which is not to matter.
        loaded = keras.models.load_model(tmp_path / "model.keras")
    received = loaded(x)
    assert received.dtype == tf.bfloat16
    np.testing.assert_array_equal(
        *(tf.cast(y, "float32").numpy() for y in (expected, received))
    )


def test_a_policy_that_is_that_of_a_model_is_taken():
    with dtype_policies.default_policy_scope("mixed_bfloat16"):
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.Dense(3)])
        layer = tfgpipe.PipelinedLayer(
            model, num_stages=2, num_microbatches=2, dtype="mixed_bfloat16"
        )
    assert layer(floats(4, 5)).dtype == tf.bfloat16


def test_a_policy_for_a_model_that_is_made_is_refused():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4, name="first")])
    words = (
        r"types from when it was made\. Received dtype='mixed_float16' and model "
        r"'\w+', whose layer 'first' is of 'float32'\. Make the model under "
        r"`keras\.config\.set_dtype_policy\('mixed_float16'\)`, or give its layers"
    )
    arguments = {"num_stages": 1, "num_microbatches": 2, "dtype": "mixed_float16"}
    with pytest.raises(ValueError, match=words):
        tfgpipe.PipelinedLayer(model, **arguments)
    with pytest.raises(ValueError, match=words):
        tfgpipe.pipeline(model, **arguments)
    with pytest.raises(ValueError, match=words):
        tfgpipe.PipelinedLayer([layers.Dense(5), model], **arguments)


def test_a_policy_that_would_change_built_weights_is_refused():
    built = layers.Dense(4, name="first")
    built.build((None, 5))
    words = (
        "dtype='float64', whose weights are float64, and layer 'first', which is built "
        "with weights of float32. Give the pipeline layers that are not built"
    )
    with pytest.raises(ValueError, match=words):
        tfgpipe.PipelinedLayer(
            [built], num_stages=1, num_microbatches=2, dtype="float64"
        )


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_float8_is_refused(num_microbatches):
    words = (
        "as gradients, and a pipeline adds up the gradients of microbatches. Received "
        "layer 'eighth' of policy 'float8_from_float32'. Use 'mixed_bfloat16', or keep "
        "the layer outside"
    )
    arguments = {"num_stages": 2, "num_microbatches": num_microbatches}
    eighth = layers.Dense(4, dtype="float8_from_float32", name="eighth")
    for stack in ([layers.Dense(4), eighth], [Itself(eighth), layers.Dense(4)]):
        with pytest.raises(ValueError, match=words):
            tfgpipe.PipelinedLayer(stack, **arguments)
    # Layers can also be made so when the pipeline is there.
    stack = [layers.Dense(4), layers.Dense(4, name="eighth")]
    layer = tfgpipe.PipelinedLayer(stack, **arguments)
    layer(np.ones((4, 4), "float32"), training=True)
    stack[1].quantize("float8")
    with pytest.raises(ValueError, match=words):
        layer(np.ones((4, 4), "float32"), training=True)


# -- loss scaling ---------------------------------------------------------------------

ROWS = 8
X, Y = floats(ROWS, 5), floats(ROWS, 3, seed=2)
LARGE = 1e6
WHERE = ("input", "target")


def overflowing(where, row):
    """Returns a mini-batch of which one row overflows, forward or backward alone."""
    x, y = X.copy(), Y.copy()
    (x if where == "input" else y)[row] = LARGE
    return x, y


def small():
    return [
        layers.Dense(6, activation="tanh", kernel_regularizer="l2"),
        layers.Dense(6, activation="tanh"),
        layers.Dense(5, activation="tanh"),
        layers.Dense(3),
    ]


def dropped():
    return [
        layers.Dense(6, use_bias=False),
        layers.BatchNormalization(momentum=0.8),
        layers.Activation("tanh"),
        layers.Dropout(0.3, seed=3),
        layers.Dense(6, activation="tanh"),
        layers.Dense(3),
    ]


def scaling(**arguments):
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=1024.0, **arguments
    )


def everything(model):
    """Returns all that a step may change, by name."""
    optimizer = model.optimizer
    variables = {
        "model": model.variables,
        "optimizer": optimizer.variables,
        "metrics": model.metrics_variables,
    }
    return {
        f"{what} {i}: {v.path}": v.numpy()
        for what, some in variables.items()
        for i, v in enumerate(some)
    }


def assert_same_state(plain, pipelined, tolerance=8 * UNIT["mixed_float16"]):
    expected, received = everything(plain), everything(pipelined)
    for (name, a), b in zip(expected.items(), received.values(), strict=True):
        compare.close(a, b, name, tolerance, tolerance)


def assert_leaves_out_one_step(plain, pipelined, where, *, row=4):
    """Trains three steps, of which the second overflows in one microbatch."""
    compare.copy_state(plain, pipelined)
    for step, (x, y) in enumerate([(X, Y), overflowing(where, row), (X, Y)]):
        before = everything(pipelined)
        for model in (plain, pipelined):
            model.train_on_batch(x, y)
        assert_same_state(plain, pipelined)
        after = everything(pipelined)
        scale = float(pipelined.optimizer.dynamic_scale.numpy())
        assert scale == (1024.0 if step == 0 else 512.0)
        kept = [v.path for v in pipelined.trainable_variables]
        kept += [v.path for v in pipelined.optimizer.inner_optimizer.variables]
        changed = {
            name.partition(": ")[2]
            for name in after
            if not np.array_equal(before.get(name), after[name])
        }
        assert bool(changed & set(kept)) == (step != 1)
    assert pipelined.optimizer.inner_optimizer.iterations.numpy() == 2


@pytest.mark.usefixtures("mixed_precision")
@pytest.mark.parametrize(
    ("schedule", "where"),
    nightly(
        itertools.product(schedules.NAMES, WHERE),
        gate=[("interleaved", "input"), ("zero_bubble", "target")],
    ),
)
def test_an_overflow_in_one_microbatch_leaves_the_step_out(schedule, where):
    plain = keras.Sequential([keras.Input((5,)), *small()])
    compare.fresh_names()
    num_devices = tfgpipe.schedules.find(schedule).choose_num_devices(4, 4)
    pipelined = tfgpipe.PipelinedModel(
        small(),
        num_stages=4,
        num_microbatches=4,
        schedule=schedule,
        devices=[f"CPU:{p}" for p in range(num_devices)],
    )
    pipelined(X)
    for model in (plain, pipelined):
        model.compile(scaling(), "mse", run_eagerly=model is plain)
    assert_leaves_out_one_step(plain, pipelined, where)


@pytest.mark.usefixtures("mixed_precision")
@pytest.mark.parametrize(
    ("where", "eagerly"),
    nightly(
        itertools.product(WHERE, [False, True]),
        gate=[("input", True), ("target", False)],
    ),
)
def test_the_same_under_fit_of_a_pipelined_layer(where, eagerly):
    plain = keras.Sequential([keras.Input((5,)), *small()])
    compare.fresh_names()
    layer = tfgpipe.PipelinedLayer(small(), num_stages=3, num_microbatches=4)
    pipelined = keras.Sequential([keras.Input((5,)), layer])
    for model in (plain, pipelined):
        model.compile(scaling(), "mse", run_eagerly=eagerly or model is plain)
    assert_leaves_out_one_step(plain, pipelined, where)


@pytest.mark.usefixtures("mixed_precision")
@pytest.mark.parametrize(
    ("schedule", "num_microbatches"),
    [("1f1b", 4), *nightly([("gpipe", 1), ("gpipe", 4)])],
)
def test_statistics_and_seeds_move_as_without_a_pipeline(schedule, num_microbatches):
    """Keras moves them in a step that it leaves out, once; so do microbatches."""
    inner = keras.Sequential([keras.Input((5,)), *dropped()])
    plain = InMicrobatches(inner, num_microbatches)
    plain(X)
    compare.fresh_names()
    pipelined = tfgpipe.PipelinedModel(
        dropped(), num_stages=2, num_microbatches=num_microbatches, schedule=schedule
    )
    pipelined(X)
    # Eagerly, as what batches of the reference hold is not to depend on any graph.
    plain.compile(scaling(), "mse", run_eagerly=True)
    pipelined.compile(scaling(), "mse")
    assert_leaves_out_one_step(plain, pipelined, "target")


@pytest.mark.usefixtures("mixed_precision")
def test_the_scale_grows_after_as_many_steps_as_keras_says():
    plain = keras.Sequential([keras.Input((5,)), *small()])
    compare.fresh_names()
    layer = tfgpipe.PipelinedLayer(small(), num_stages=2, num_microbatches=2)
    pipelined = keras.Sequential([keras.Input((5,)), layer])
    compare.copy_state(plain, pipelined)
    for model in (plain, pipelined):
        optimizer = scaling(dynamic_growth_steps=2)
        model.compile(optimizer, "mse", run_eagerly=model is plain)
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert float(pipelined.optimizer.dynamic_scale.numpy()) == 4096.0
    assert_same_state(plain, pipelined)


@pytest.mark.nightly
@pytest.mark.usefixtures("mixed_precision")
@pytest.mark.parametrize(
    ("face", "row"),
    nightly(
        itertools.product(["layer", "model"], [1, 6]),
        gate=[("model", 6), ("layer", 1)],
    ),
)
def test_an_overflow_on_one_replica_leaves_the_step_out_on_all(face, row):
    """Keras asks the first replica alone, and steps on if it was another."""
    plain = keras.Sequential([keras.Input((5,)), *dropless()])
    plain.compile(scaling(), "mse", run_eagerly=True)
    compare.fresh_names()
    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2)
    with strategy.scope():
        if face == "layer":
            layer = tfgpipe.PipelinedLayer(dropless(), num_microbatches=2)
            pipelined = keras.Sequential([keras.Input((5,)), layer])
        else:
            pipelined = tfgpipe.PipelinedModel(
                dropless(), num_microbatches=2, schedule="1f1b"
            )
            pipelined(X[:1])
        pipelined.compile(scaling(), "mse")
    for a, b in zip(plain.variables, pipelined.variables, strict=True):
        b.assign(a.numpy())
    for step, (x, y) in enumerate([(X, Y), overflowing("target", row), (X, Y)]):
        for model in (plain, pipelined):
            model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        assert_same_on_all(strategy, plain, pipelined)
        scales = strategy.experimental_local_results(
            pipelined.optimizer.dynamic_scale.value
        )
        assert [float(s) for s in scales] == [1024.0 if step == 0 else 512.0] * 2


def dropless():
    return [layers.Dense(6, activation="tanh"), layers.Dense(3)]


def assert_same_on_all(strategy, plain, pipelined):
    tolerance = 8 * UNIT["mixed_float16"]
    pairs = [(plain.variables, pipelined.variables)]
    pairs += [(plain.optimizer.variables, pipelined.optimizer.variables)]
    for expected, received in pairs:
        for a, b in zip(expected, received, strict=True):
            copies = strategy.experimental_local_results(b.value)
            assert len(copies) == 2
            np.testing.assert_array_equal(copies[0].numpy(), copies[1].numpy(), b.path)
            compare.close(a.numpy(), copies[0].numpy(), a.path, tolerance, tolerance)
