"""What the test suites of other pipeline libraries check, and no other file here does.

The whole list is `tests/README.md`: each behaviour of torchgpipe's, PyTorch's and
Lingvo's suites with the test that checks it here. As everywhere, the reference is the
plain Keras model of the same layers, weights and seeds. The numbers that their suites
take run nightly.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, zoo
from tests.helpers.layer_stacks import (
    REMAT_MODES,
    STACKS,
    ResidualBlock,
    dense,
    dropped,
    normalised,
)
from tests.helpers.marks import nightly
from tests.helpers.reference import OneAfterAnother
from tests.helpers.zoo import ZOO, floats, ids
from tfgpipe.stage import normalization
from tfgpipe_params.lm.transformer import Block, Positions

layers = keras.layers
DOUBLE = dict(zip(("rtol", "atol"), compare.TOLERANCES["float64"], strict=True))

# Numbers of stages and microbatches, as Lingvo takes them.
FEW = list(itertools.product((1, 2), (1, 2)))

# Where batch normalization once a microbatch is what is meant.
MANY_AVERAGES = pytest.mark.filterwarnings("ignore:Batch normalization sees")


# -- graphs ---------------------------------------------------------------------------


class Calls:
    """The calls of a step's graph that run programs of stages."""

    def __init__(self, graph: tf.Graph) -> None:
        library = graph.as_graph_def().library.function
        self._functions = {f.signature.name: f for f in library}
        self.all = [
            op for op in graph.get_operations() if op.type.endswith("PartitionedCall")
        ]

    def named(self, kind: str, k: int | None = None) -> list[tf.Operation]:
        """Returns the forward or backward calls, of all stages or one, in order."""
        return [
            op
            for op in self.all
            if f"stage_{kind}" in op.get_attr("f").name
            and (k is None or op.device.endswith(f"CPU:{k}"))
        ]

    def holds(self, op: tf.Operation, kind: str) -> bool:
        """Returns whether the function that is called holds operations of a kind."""
        return kind in self._types(op.get_attr("f").name)

    def _types(self, name: str) -> set[str]:
        types = set()
        for node in self._functions[name].node_def:
            types.add(node.op)
            for attribute in node.attr.values():
                if attribute.func.name:
                    types |= self._types(attribute.func.name)
        return types

    def types(self) -> set[str]:
        """Returns all kinds of operations inside functions."""
        return set().union(*map(self._types, self._functions))


def step_of(model: Any, *, watch: bool = False) -> Callable[[tf.Tensor], Any]:
    """Returns a step of a model, from inputs to gradients of weights, or of inputs."""

    @tf.function
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            if watch:
                tape.watch(x)
            loss = compare.squares(model(x, training=True))
        return tape.gradient(loss, x if watch else model.trainable_variables)

    return step


def tanh_stages(num_stages: int, **arguments: Any) -> tfgpipe.PipelinedLayer:
    """Returns stages of one `Tanh` each, whose gradient does not need another."""
    stack = []
    for _ in range(num_stages):
        stack += [layers.Dense(4, activation="tanh"), layers.Dense(4)]
    layer = tfgpipe.PipelinedLayer(stack, partition=[2] * num_stages, **arguments)
    layer.build((None, 4))
    return layer


def follows(op: tf.Operation, other: tf.Operation) -> bool:
    return other in (*op.control_inputs, *(x.op for x in op.inputs))


# -- rematerialisation ----------------------------------------------------------------

RECOMPUTED = {
    "stage": lambda M: M,
    "layer": lambda M: M,
    "except_last": lambda M: M - 1,
    "products": lambda M: M,
    # Each would save the result of `Tanh`; recomputed, one holds that and another.
    "auto": lambda M: M if M > 2 else 0,
    "none": lambda M: 0,
}


@pytest.mark.parametrize(
    ("remat", "num_microbatches"),
    nightly(
        itertools.product(REMAT_MODES, [1, 2, 4]),
        gate=[*((remat, 4) for remat in REMAT_MODES), ("except_last", 1)],
    ),
)
def test_just_so_many_microbatches_are_recomputed(remat, num_microbatches):
    # Three rows for four microbatches: there are three, and the last of them is last.
    num_rows = 3
    M = min(num_rows, num_microbatches)
    layer = tanh_stages(2, num_microbatches=num_microbatches, remat=remat)
    step = step_of(layer)
    calls = Calls(step.get_concrete_function(tf.TensorSpec([num_rows, 4])).graph)
    for k in range(2):
        forwards, backwards = calls.named("forward", k), calls.named("backward", k)
        assert len(forwards) == len(backwards) == M
        assert all(calls.holds(op, "Tanh") for op in forwards)
        assert all(calls.holds(op, "TanhGrad") for op in backwards)
        again = [calls.holds(op, "Tanh") for op in backwards]
        # Backwards run from the last microbatch to the first.
        count = RECOMPUTED[remat](M)
        assert again == [False] * (M - count) + [True] * count


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_a_microbatch_is_recomputed_after_the_backward_of_the_one_before(remat):
    """Within its own backward call, that is, and these come one after another."""
    # Weightless, since an accumulator would order them anyway.
    stack = [layers.Activation(name) for name in ("tanh", "sigmoid") * 2]
    layer = tfgpipe.PipelinedLayer(stack, num_stages=2, num_microbatches=4, remat=remat)
    layer.build((None, 4))
    step = step_of(layer, watch=True)
    graph = step.get_concrete_function(tf.TensorSpec([8, 4])).graph
    calls = Calls(graph)
    assert "Tanh" not in {op.type for op in graph.get_operations()}
    assert {*calls.all} == {*calls.named("forward"), *calls.named("backward")}
    for k in range(2):
        for before, after in itertools.pairwise(calls.named("backward", k)):
            assert follows(after, before)


@pytest.mark.parametrize(
    ("training", "remat"),
    nightly(
        itertools.product((False, True), REMAT_MODES),
        gate=list(zip((False, True) * 3, REMAT_MODES, strict=False)),
    ),
)
def test_without_gradients_there_is_nothing_for_gradients(training, remat):
    K, M = 3, 4
    layer = tanh_stages(K, num_microbatches=M, remat=remat)
    call = tf.function(lambda x: layer(x, training=training))
    graph = call.get_concrete_function(tf.TensorSpec([8, 4])).graph
    calls = Calls(graph)
    assert len(calls.all) == len(calls.named("forward")) == K * M
    types = {op.type for op in graph.get_operations()} | calls.types()
    assert not types & {"Empty", "InplaceAdd", "TanhGrad"}
    if not training:  # What evaluation makes is the boundaries alone.
        assert all(len(op.outputs) == 1 for op in calls.all)


def test_twenty_times_forward_only():
    plain, pipelined = compare.pair(
        dense, (5,), "float32", num_stages=4, num_microbatches=3
    )
    traces = []

    @tf.function
    def call(x):
        traces.append(x)
        return pipelined(x)

    for seed in range(20):
        x = floats(8, 5, seed=seed)
        compare.close(
            plain(x).numpy(),
            call(tf.constant(x)).numpy(),
            "outputs",
            compare.RTOL,
            compare.ATOL,
        )
    assert len(traces) == 1


# -- errors ---------------------------------------------------------------------------


def within_a_minute(function: Callable[[], Any]) -> Any:
    """Returns or raises what a function does, unless it hangs."""
    results, errors = [], []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    # A daemon, so that a hanging one does not keep the tests from ending.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "It hangs."
    if errors:
        raise errors[0]
    return results[0]


class Refuses(layers.Layer):
    """Fails on very large numbers, on its way forward or backward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def call(self, x):
        @tf.custom_gradient
        def refuse(x):
            return self._checked("forward", x), lambda dy: self._checked("backward", dy)

        return refuse(x)

    def _checked(self, way, x):
        if way != self.way:
            return x
        return tf.debugging.check_numerics(x * 1e30, "refused") * 1e-30


@pytest.mark.parametrize(
    ("k", "way", "graph"),
    nightly(
        itertools.product(range(4), ["forward", "backward"], [True, False]),
        gate=[(0, "backward", True), (3, "forward", True), (2, "backward", False)],
    ),
)
def test_a_stage_that_fails_ends_the_step_and_not_the_next_one(k, way, graph):
    stack = [layers.Dense(4) for _ in range(4)]
    stack[k] = Refuses(way)
    layer = tfgpipe.PipelinedLayer(stack, num_stages=4, num_microbatches=8)
    layer.build((None, 4))
    step = step_of(layer)
    if not graph:
        step = step.python_function
    good, bad = floats(8, 4), floats(8, 4)
    bad[5] = 1e20  # And so will be its gradient, the loss being quadratic.
    good, bad = tf.constant(good), tf.constant(bad)
    before = within_a_minute(lambda: step(good))
    # When one device fails, TensorFlow cancels a graph's others, and now and then it is
    # their cancellation that it reports.
    errors = [tf.errors.InvalidArgumentError]
    errors += [tf.errors.CancelledError] if graph else []
    for _ in range(2):
        with pytest.raises(tuple(errors)) as caught:
            within_a_minute(lambda: step(bad))
        assert type(caught.value) in errors
        compare.assert_equal(before, within_a_minute(lambda: step(good)))


class Unexpected(Exception):  # noqa: N818
    """An error of a user's own."""


@pytest.mark.parametrize("graph", [True, False])
def test_an_exception_of_a_layers_python_keeps_its_type(graph):
    class Raises(layers.Layer):
        def call(self, x, training=None):
            if training:
                raise Unexpected("by whom it is raised")
            return x

    layer = tfgpipe.PipelinedLayer(
        [layers.Dense(4), layers.Dense(4), Raises()], num_stages=3, num_microbatches=4
    )
    layer(floats(8, 4))
    call = tf.function(layer) if graph else layer
    with pytest.raises(Unexpected, match="by whom it is raised"):
        call(tf.constant(floats(8, 4)), training=True)
    assert call(tf.constant(floats(8, 4))).shape == (8, 4)


@pytest.mark.parametrize("graph", [True, False])
def test_a_failing_stage_stops_those_before_it_soon(graph):
    ran = []

    class Notes(layers.Layer):
        def call(self, x):
            def note(x):
                time.sleep(0.02)
                ran.append(1)
                return x

            return tf.ensure_shape(tf.numpy_function(note, [x], x.dtype), x.shape)

    layer = tfgpipe.PipelinedLayer(
        [Notes(), Refuses("forward")], num_stages=2, num_microbatches=50
    )
    layer.build((None, 4))
    ran.clear()  # Of the probe.
    call = tf.function(layer) if graph else layer
    call(tf.zeros((50, 4)))
    assert len(ran) == 50
    ran.clear()
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.CancelledError)):
        call(tf.fill((50, 4), 1e20))
    # Eagerly operations come in the schedule's order: at the time that the second stage
    # takes the first microbatch, the first stage has taken the second one.
    assert len(ran) < 25 if graph else len(ran) == 2


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("what", [42, "words", [1.0, 2.0], object()])
def test_what_is_no_tensor_is_refused_as_keras_does(what, built):
    layer = tanh_stages(2, num_microbatches=2)
    if not built:
        layer = tfgpipe.PipelinedLayer(dense(), num_stages=2, num_microbatches=2)
    with pytest.raises(ValueError, match=r"(?i)tensor"):
        layer(what)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (4,), ()])
def test_another_input_shape_is_refused_as_keras_does(shape, graph):
    layer = tfgpipe.PipelinedLayer(
        [layers.Dense(4), layers.Dense(2)], num_stages=2, num_microbatches=2
    )
    layer(tf.ones((4, 5)))
    with pytest.raises(ValueError, match=r"incompatible|shape"):
        (tf.function(layer) if graph else layer)(tf.ones(shape))


# -- gradients ------------------------------------------------------------------------


class Defined(layers.Layer):
    """Has a gradient of its own: minus three times what comes, and of w its cube."""

    def build(self, shape):
        self.w = self.add_weight(shape=(), initializer="ones", name="w")

    def call(self, x):
        @tf.custom_gradient
        def defined(x, w):
            y = tf.sign(x) * w
            return y, lambda dy: (-3.0 * dy, tf.reduce_sum(dy * y) ** 3)

        return defined(x, tf.convert_to_tensor(self.w))


@pytest.mark.parametrize("remat", ["stage", "none", *nightly(["layer", "except_last"])])
def test_gradients_that_layers_define_are_taken(remat):
    def make():
        return [Defined(), layers.Dense(4), Defined(), layers.Dense(3)]

    # The cube is not linear in rows, so only one microbatch gives what the plain does.
    plain, pipelined = compare.pair(
        make, (4,), "float32", num_stages=2, num_microbatches=1, remat=remat
    )
    x = floats(6, 4)
    compare.assert_runs_the_same(plain, pipelined, x)

    layer = tfgpipe.PipelinedLayer(
        [Defined(), Defined()], num_stages=2, num_microbatches=3, remat=remat
    )
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
    by_input, *by_weights = tape.gradient(y, [x, *layer.trainable_variables])
    np.testing.assert_array_equal(by_input, np.full((6, 4), 9.0))
    signs = [np.sum(np.sign(rows)) for rows in np.split(x.numpy(), 3)]
    expected = [sum((-3 * s) ** 3 for s in signs), sum(s**3 for s in signs)]
    np.testing.assert_allclose(by_weights, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["dense", "embedded"])
def test_an_input_without_gradient_leaves_the_weights_theirs(name):
    """Integers, and floats that nobody watches."""
    chosen = STACKS[name]
    plain, pipelined = compare.pair(
        chosen.make, chosen.shape, chosen.dtype, num_stages=3, num_microbatches=3
    )
    x = tf.constant(chosen.data(7))
    received, expected = step_of(pipelined)(x), step_of(plain).python_function(x)
    assert len(received) == len(plain.trainable_variables)
    for a, b, v in zip(expected, received, plain.trainable_variables, strict=True):
        a, b = tf.convert_to_tensor(a).numpy(), tf.convert_to_tensor(b).numpy()
        assert np.any(a), v.path
        compare.close(a, b, v.path, compare.RTOL, compare.ATOL)


def causal_language_model():
    """A transformer of one block, from ids to logits."""
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(zoo.IDS, 4)(inputs)
    x = Positions()(x)
    x = Block(width=4, num_heads=2, mlp_width=6)(x)
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(zoo.IDS)(x))


@pytest.mark.nightly
def test_gradients_are_the_differences_of_a_language_models_loss(floatx):
    floatx("float64")
    model = tfgpipe.pipeline(causal_language_model(), num_stages=2, num_microbatches=2)
    x, y = ids(3, 5), ids(3, 5, seed=2)

    @tf.function
    def loss():
        loss = keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )
        return tf.reduce_mean(loss)

    with tf.GradientTape() as tape:
        value = loss()
    gradients = tape.gradient(value, model.trainable_variables)
    rng = np.random.default_rng(0)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        gradient = tf.convert_to_tensor(gradient).numpy()
        before = variable.numpy()
        for _ in range(2):
            where = tuple(rng.integers(before.shape))
            sides = []
            for step in (-1e-5, 1e-5):
                moved = before.copy()
                moved[where] += step
                variable.assign(moved)
                sides.append(loss().numpy())
            variable.assign(before)
            slope = (sides[1] - sides[0]) / 2e-5
            assert gradient[where] == pytest.approx(slope, rel=1e-6, abs=1e-9)


# -- state ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "num_dropouts", "remat"),
    [
        *((2, 5, 4, remat) for remat in REMAT_MODES),
        *nightly((K, M, 10, "stage") for K, M in FEW),
        *nightly((2, 10, 10, remat) for remat in REMAT_MODES),
        *nightly([(2, 10, 100, "stage")]),
    ],
)
def test_what_dropouts_drop_they_drop_again(
    num_stages, num_microbatches, num_dropouts, remat
):
    layer = tfgpipe.PipelinedLayer(
        [layers.Dropout(1.0 / num_dropouts, seed=i) for i in range(num_dropouts)],
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        remat=remat,
    )
    x = tf.ones((10, 40))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
    gradient = tape.gradient(y, x)
    kept = y.numpy() != 0.0
    assert 0.2 < kept.mean() < 0.5  # About 1 / e.
    assert len(np.unique(kept, axis=0)) == 10
    np.testing.assert_array_equal(gradient.numpy() != 0.0, kept)
    np.testing.assert_allclose(gradient, y, rtol=1e-5)


@MANY_AVERAGES
def test_training_and_evaluation_take_turns():
    def make():
        return [*normalised()[:3], *dropped()[1:]]

    plain, pipelined = compare.pair(
        make, (5,), "float32", num_stages=3, num_microbatches=2
    )
    one_by_one = OneAfterAnother(plain, 2)
    x = floats(6, 5)
    for training in (True, False, True):
        compare.assert_runs_the_same(one_by_one, pipelined, x, training=training)


@pytest.mark.parametrize("num_stages", [4, *nightly([1, 2])])
def test_deferred_averages_do_not_depend_on_the_cut(num_stages, floatx):
    floatx("float64")

    def make(norm):
        return lambda: [
            layers.Dense(4, activation="tanh"),
            layers.Dense(3),
            layers.Activation("sigmoid"),
            norm(momentum=0.5),
        ]

    plain = compare.plain_model(make(layers.BatchNormalization), (5,), "float64")
    pipelined = compare.pipelined_model(
        make(normalization.DeferredBatchNormalization),
        (5,),
        "float64",
        num_stages=num_stages,
        num_microbatches=4,
    )
    compare.copy_state(plain, pipelined)
    for rows in (8, 7):
        x = floats(rows, 5, seed=rows)
        plain(x, training=True)
        pipelined(x, training=True)
        for a, b in zip(
            plain.non_trainable_variables,
            pipelined.non_trainable_variables,
            strict=True,
        ):
            compare.close(a.numpy(), b.numpy(), a.name, **DOUBLE)


def alive(*kinds: type) -> list[int]:
    """Returns how many objects there are of each kind."""
    gc.collect()
    objects = gc.get_objects()
    return [sum(isinstance(x, kind) for x in objects) for kind in kinds]


@pytest.mark.parametrize(
    ("remat", "num_steps"), [("stage", 6), *nightly([("stage", 15), ("none", 15)])]
)
def test_steps_leave_no_tensor_and_no_graph_behind(remat, num_steps):
    stack = [layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5)]
    model = compare.pipelined_model(
        lambda: stack,
        (5,),
        "float32",
        num_stages=2,
        num_microbatches=3,
        remat=remat,
        batch_norm="deferred",
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    step = step_of(model).python_function
    counts = {}
    # Held, since what earlier tests have left may go meanwhile.
    kinds = (type(tf.constant(0)), tf.Graph)
    left = [x for x in gc.get_objects() if isinstance(x, kinds)]
    for i in range(1, num_steps + 1):
        gradients = step(tf.constant(floats(8, 5, seed=i)))
        optimizer.apply(gradients, model.trainable_variables)
        del gradients
        if i in (3, num_steps):
            counts[i] = alive(*kinds)
    assert counts[3][0] > 10  # They are seen at all.
    assert counts[num_steps] == counts[3]
    del left


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dense", "embedded"])
def test_twenty_iterations_of_an_optimizer(name, floatx):
    floatx("float64")
    chosen = STACKS[name]
    dtype = "float64" if chosen.dtype == "float32" else chosen.dtype
    models = compare.pair(
        chosen.make, chosen.shape, dtype, num_stages=4, num_microbatches=3
    )
    x = tf.constant(chosen.data(8).astype(dtype))

    def train(model):
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = compare.squares(model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        losses = [step(x).numpy() for _ in range(20)]
        return losses, [v.numpy() for v in (*model.variables, *optimizer.variables)]

    (losses, variables), (other_losses, others) = map(train, models)
    assert losses[-1] < 0.9 * losses[0]
    compare.close(np.array(losses), np.array(other_losses), "losses", **DOUBLE)
    compare.assert_close(variables, others, **DOUBLE)


# -- devices and names ----------------------------------------------------------------


@pytest.mark.parametrize(
    "devices",
    [
        ["CPU:1", "CPU:1", "CPU:0"],
        ["CPU:5", "CPU:2", "CPU:7"],
        *nightly([["CPU:0", "CPU:1", "CPU:0"], ["CPU:3", "CPU:3", "CPU:3"]]),
    ],
    ids=" ".join,
)
def test_stages_may_share_devices_in_any_order(devices):
    plain, pipelined = compare.pair(
        dense,
        (5,),
        "float32",
        partition=[1, 2, 1],
        num_microbatches=3,
        devices=devices,
    )
    x = floats(7, 5)
    compare.assert_runs_the_same(plain, pipelined, x)
    (layer,) = pipelined.layers
    for stage, device in zip(layer.stages, devices, strict=True):
        for weight in stage.weights:
            assert weight.value.device.endswith(device)
    calls = Calls(step_of(layer).get_concrete_function(tf.constant(x)).graph)
    for kind in ("forward", "backward"):
        ran = collections.Counter(op.device[-5:] for op in calls.named(kind))
        assert ran == {d: 3 * n for d, n in collections.Counter(devices).items()}


def tail(variable: keras.Variable) -> list[str]:
    """Returns the end of a path, less the number that Keras gives to equal names."""
    layer, name = variable.path.split("/")[-2:]
    return [re.sub(r"(seed_generator)_\d+", r"\1", layer), name]


@MANY_AVERAGES
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("make", [dense, normalised, dropped])
def test_layers_keep_their_names_and_the_wrapper_has_their_variables(make, num_stages):
    def named():
        stack = make()
        for i, layer in enumerate(stack):
            layer.name = f"layer_{i}"
        return stack

    plain, pipelined = compare.pair(
        named, (5,), "float32", num_stages=num_stages, num_microbatches=2
    )
    (layer,) = pipelined.layers
    assert [x.name for x in layer.layers] == [x.name for x in plain.layers]
    assert layer.stages[0].layers[0].name == "layer_0"
    for of in (
        "variables",
        "weights",
        "trainable_variables",
        "trainable_weights",
        "non_trainable_variables",
        "non_trainable_weights",
    ):
        expected, received = getattr(plain, of), getattr(layer, of)
        assert [v.shape for v in received] == [v.shape for v in expected]
        assert list(map(tail, received)) == list(map(tail, expected))
    assert layer.count_params() == plain.count_params()


# -- models ---------------------------------------------------------------------------


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(3, 4), *nightly(FEW)])
def test_what_the_first_stage_gives_beside_comes_out_whole(
    num_stages, num_microbatches
):
    def make():
        inputs = keras.Input((5,))
        x = layers.Dense(6, activation="tanh")(inputs)
        aside = layers.Dense(2)(x)
        x = layers.Dense(4, activation="tanh")(x)
        return keras.Model(inputs, {"y": layers.Dense(3)(x), "aside": aside})

    plain, pipelined = compare.model_pair(
        make, num_stages=num_stages, num_microbatches=num_microbatches
    )
    x = floats(7, 5)
    received = compare.run(pipelined, x)
    assert received.outputs["aside"].shape == (7, 2)
    compare.assert_same(compare.run(plain, x, graph=False), received)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), nightly(FEW, gate=[(2, 2)])
)
def test_a_structure_with_nothing_in_a_place_keeps_it(num_stages, num_microbatches):
    def make():
        a = keras.Input((4,), name="a")
        b = keras.Input((4,), name="b", optional=True)
        x = layers.Dense(4, activation="tanh")(a)
        x = zoo.AddsIfThere()([x, b])
        return keras.Model({"a": a, "b": b}, {"y": layers.Dense(2)(x), "b": b, "x": x})

    plain, pipelined = compare.model_pair(
        make, num_stages=num_stages, num_microbatches=num_microbatches
    )
    for b in (None, floats(5, 4, seed=2)):
        x = {"a": floats(5, 4), "b": b}
        received = compare.run(pipelined, x)
        assert (received.outputs["b"] is None) == (b is None)
        compare.assert_same(compare.run(plain, x, graph=False), received)


def test_a_skip_within_a_stage_is_no_concern_of_the_pipeline():
    layer = tfgpipe.PipelinedLayer(
        zoo.skips(), num_microbatches=2, partition=[4, 1], jit_compile=False
    )
    # From the first call to the fourth, by its width of six; the fourth gives 8 + 6.
    assert [len(stage.segment.output_ids) for stage in layer.stages] == [1, 1]
    call = tf.function(layer).get_concrete_function(tf.TensorSpec([6, 5]))
    for op in Calls(call.graph).all:
        widths = [x.shape[-1] for x in (*op.inputs, *op.outputs) if x.shape.rank == 2]
        assert [3, 6] not in [x.shape.as_list() for x in (*op.inputs, *op.outputs)]
        assert 14 in widths


class WeighsAll(layers.Layer):
    """The mean of layers' outputs, by weights that are learnt (Bapna et al. 2018)."""

    def build(self, shapes):
        self.w = self.add_weight(shape=(len(shapes),), initializer="normal", name="w")

    def call(self, outputs):
        share = tf.unstack(tf.nn.softmax(tf.convert_to_tensor(self.w)))
        return tf.add_n([p * y for p, y in zip(share, outputs, strict=True)])

    def compute_output_shape(self, shapes):
        return shapes[0]


def transparent():
    """Seven calls, of which the last but one reads what all before it gave."""
    inputs = keras.Input((5,))
    x = layers.Dense(6)(inputs)
    outputs = [x]
    for _ in range(4):
        outputs.append(x := ResidualBlock(6)(x))
    return keras.Model(inputs, layers.Dense(2)(WeighsAll()(outputs)))


@functools.cache
def plain_run(name: str) -> tuple[keras.Model, Any, compare.Run]:
    """Returns a plain model, its inputs and what a step of it gives, made once."""
    make, data = MODELS[name]
    model, x = make(), data(5)
    for variable in model.variables:
        if variable.path.endswith("weighs_all/w"):
            variable.assign([0.3, -0.2, 0.8, 0.1, -0.5])
    return model, x, compare.run(model, x, graph=False)


MODELS = {
    "transparent": (transparent, lambda rows: floats(rows, 5)),
    "language_model": (causal_language_model, lambda rows: ids(rows, 5)),
    "encoder_decoder": (ZOO["encoder_decoder"].make, ZOO["encoder_decoder"].data),
}


GRID = [*({"num_stages": K, "num_microbatches": M} for K, M in FEW), {"first": 3}]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "arguments"),
    nightly(
        itertools.product(["transparent", "language_model"], GRID),
        gate=[("transparent", {"first": 3}), ("encoder_decoder", {"first": 3})],
    ),
    ids=str,
)
def test_transparent_attention_language_models_and_translators(name, arguments):
    plain, x, expected = plain_run(name)
    model = MODELS[name][0]()
    if "first" in arguments:  # So many calls of layers in the first stage.
        first = arguments["first"]
        whole = tfgpipe.plan(model, num_stages=1, num_microbatches=1, sample=x)
        balance = [first, sum(whole.calls_per_stage) - first]
        arguments = {"balance": balance, "num_microbatches": 2}
    pipelined = tfgpipe.pipeline(model, **arguments)
    compare.copy_state(plain, pipelined)
    for weight, gradient in expected.weight_grads.items():
        assert np.all(gradient != 0.0) or not weight.endswith("weighs_all/w")
    compare.assert_same(expected, compare.run(pipelined, x))


# -- sequences ------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, *nightly([1])])
def test_packed_sequences_give_what_they_give_apart(num_stages):
    def make():
        return [
            layers.Embedding(zoo.IDS, 4),
            zoo.Attends(),
            layers.Dense(4, activation="tanh"),
            zoo.Attends(),
            layers.Dense(3),
        ]

    apart = make()
    packed = tfgpipe.PipelinedLayer(make(), num_stages=num_stages, num_microbatches=2)
    sequences = [ids(n, seed=n) for n in (2, 4, 3, 2)]
    # Two to a row, the second row a number short; segment 0 is padding.
    tokens = np.zeros((2, 6), np.int32)
    segments = np.zeros((2, 6), np.int32)
    places = [(0, 0), (0, 2), (1, 0), (1, 3)]
    for i, ((row, start), sequence) in enumerate(zip(places, sequences, strict=True)):
        tokens[row, start : start + len(sequence)] = sequence
        segments[row, start : start + len(sequence)] = 1 + i % 2

    def one_alone(sequence):
        x, segment = sequence[None], np.ones((1, len(sequence)), np.int32)
        for layer in apart:
            is_attention = isinstance(layer, zoo.Attends)
            x = layer(x, segment_ids=segment) if is_attention else layer(x)
        return x[0]

    def own(row, start, y, sequence):
        return y[row, start : start + len(sequence)]

    packed(tokens, segment_ids=segments)
    list(map(one_alone, sequences))
    weights = [v for layer in apart for v in layer.trainable_variables]
    for a, b in zip(weights, packed.trainable_variables, strict=True):
        b.assign(a.value)
    with tf.GradientTape() as tape:
        expected = [one_alone(sequence) for sequence in sequences]
        loss = compare.squares(tf.concat(expected, axis=0))
    grads = tape.gradient(loss, weights)
    with tf.GradientTape() as tape:
        y = packed(tokens, segment_ids=segments, training=True)
        received = [
            own(*place, y, sequence)
            for place, sequence in zip(places, sequences, strict=True)
        ]
        loss = compare.squares(tf.concat(received, axis=0))
    packed_grads = tape.gradient(loss, packed.trainable_variables)
    for a, b in zip([*expected, *grads], [*received, *packed_grads], strict=True):
        a, b = (tf.convert_to_tensor(x).numpy() for x in (a, b))
        compare.close(a, b, "packed", compare.RTOL, compare.ATOL)


class Decodes(layers.Layer):
    """Causal attention over `past` `[B, t, D]` and `x` `[B, s, D]`; gives both, too."""

    def build(self, shapes):
        self.query, self.key = layers.Dense(4), layers.Dense(4)
        for inner in (self.query, self.key):
            inner.build(shapes[0])

    def call(self, pair):
        x, past = pair
        all_ = tf.concat([past, x], axis=1)  # [B, t + s, D]
        scores = tf.matmul(self.query(x), self.key(all_), transpose_b=True)
        t, s = tf.shape(past)[1], tf.shape(x)[1]
        seen = tf.range(t + s)[None, :] <= t + tf.range(s)[:, None]
        scores = tf.where(seen, scores, -1e9)
        return x + tf.matmul(tf.nn.softmax(scores), all_), all_

    def compute_output_spec(self, pair):
        return tuple(keras.KerasTensor((None, None, 4), x.dtype) for x in pair)


def decoder():
    """Ids and what came before, to logits and what the next call is to be given."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    pasts = [keras.Input((None, 4), name=f"past_{i}") for i in range(2)]
    states = [keras.Input((4,), name=f"state_{i}") for i in range(2)]
    x = layers.Embedding(zoo.IDS, 4)(tokens)
    news = []
    for past in pasts:
        x, new = Decodes()([x, past])
        x = layers.Dense(4, activation="tanh")(x)
        news.append(new)
    x, *ends = layers.LSTM(4, return_sequences=True, return_state=True)(
        x, initial_state=states
    )
    return keras.Model([tokens, pasts, states], [layers.Dense(zoo.IDS)(x), news, ends])


@pytest.mark.parametrize(("num_stages", "graph"), [(2, True), *nightly([(1, False)])])
def test_decoding_step_by_step_gives_the_full_pass(num_stages, graph):
    plain, pipelined = compare.model_pair(
        decoder, num_stages=num_stages, num_microbatches=2
    )
    rows, length = 3, 5
    tokens = tf.constant(ids(rows, length))

    def start():
        pasts = [tf.zeros((rows, 0, 4))] * 2
        return [pasts, [tf.zeros((rows, 4))] * 2]

    call = tf.function(pipelined, reduce_retracing=True) if graph else pipelined
    full = [y for model in (plain, pipelined) for y in [model([tokens, *start()])]]
    given, logits = start(), []
    for t in range(length):
        y, *given = call([tokens[:, t : t + 1], *given])
        logits.append(y)
    stepwise = [tf.concat(logits, axis=1), *given]
    for whole in full:
        flat = zip(*map(keras.tree.flatten, (whole, stepwise)), strict=True)
        for a, b in flat:
            compare.close(a.numpy(), b.numpy(), "decoded", compare.RTOL, compare.ATOL)


@pytest.mark.parametrize("depth", [2, *nightly([4, 8])])
def test_stacked_recurrent_layers(depth):
    def make():
        # Unrolled where there are many: that takes a third of the time to trace.
        lstm = functools.partial(layers.LSTM, return_sequences=True, unroll=depth > 2)
        return [lstm(3) for _ in range(depth)]

    plain, pipelined = compare.pair(
        make, (4, 3), "float32", num_stages=depth, num_microbatches=2
    )
    x = floats(4, 4, 3)
    compare.assert_runs_the_same(plain, pipelined, x)


# -- plans ----------------------------------------------------------------------------


@pytest.mark.parametrize("balance", ["time", "memory"])
def test_layers_of_several_inputs_and_outputs_are_weighed(balance):
    model = zoo.states_handed_on()
    before = [v.numpy() for v in model.variables]
    plan = tfgpipe.plan(
        model,
        num_stages=2,
        num_microbatches=2,
        balance=balance,
        sample=floats(4, 5, 3),
    )
    assert sum(plan.calls_per_stage) == 4
    assert all(stage.cost > 0 for stage in plan.stages)
    compare.assert_equal(before, model.variables)
