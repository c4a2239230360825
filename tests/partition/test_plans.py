"""Plans: what they balance, what they say, and how a running model is cut anew."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.layer_stacks import dropped, normalised
from tests.helpers.marks import nightly
from tfgpipe import remat as remat_lib
from tfgpipe import schedules
from tfgpipe._compat import keras_internals
from tfgpipe._util import stage_spans
from tfgpipe.capture import tracer
from tfgpipe.capture.interpreter import TensorKey
from tfgpipe.costs import profiler
from tfgpipe.partition import balances
from tfgpipe.stage.options import StageOptions
from tfgpipe.stage.stage import Stage, StageCache

layers = keras.layers
X = np.random.default_rng(0).standard_normal((12, 5), dtype=np.float32)


def dense(*units):
    return [layers.Dense(n, name=f"dense_{i}") for i, n in enumerate(units)]


def plan(model, **arguments):
    arguments = {"num_stages": 2, "num_microbatches": 4, "sample": X, **arguments}
    return tfgpipe.plan(model, **arguments)


def with_skip():
    """A wide hidden layer in the middle, and a skip around it."""
    x = inputs = keras.Input((6,))
    x = skip = layers.Dense(6, name="first")(x)
    x = layers.Dense(60, name="wide")(x)
    x = layers.Dense(6, name="narrow")(x)
    x = layers.Add(name="add")([x, skip])
    return keras.Model(inputs, layers.Dense(6, name="last")(x))


class Clock:
    """Stands for the module `time` where costs are measured: layers alone move it."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        return self.seconds


CLOCK = Clock()


class Takes(layers.Layer):
    """Takes so many seconds of `CLOCK` forward, and as many backward."""

    def __init__(self, seconds: float, **kwargs):
        super().__init__(**kwargs)
        self.seconds = seconds

    def call(self, x):
        @tf.custom_gradient
        def slow(x):
            return self._identity(x), lambda dy: self._identity(dy)

        return slow(x)

    def _identity(self, x):
        def wait(x):
            CLOCK.seconds += self.seconds
            return x

        return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape)

    def get_config(self):
        return {**super().get_config(), "seconds": self.seconds}


# -- what is balanced -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("balance", "num_stages"),
    nightly(
        itertools.product(["params", "flops", "memory"], [1, 2, 3]),
        gate=[("params", 1), ("flops", 2), ("memory", 3)],
    ),
)
def test_no_other_cut_is_better(balance, num_stages):
    model = with_skip()
    best = plan(model, balance=balance, num_stages=num_stages, sample=None)
    others = [recut(best, cut) for cut in cuts(5, num_stages)]
    least = min(max(stage.cost for stage in other.stages) for other in others)
    assert max(stage.cost for stage in best.stages) == pytest.approx(least)


def recut(made, cut):
    """Returns a plan that is cut elsewhere, without tracing again."""
    return dataclasses.replace(made, calls_per_stage=tuple(cut))


def cuts(num_calls, num_stages):
    for ends in itertools.combinations(range(1, num_calls), num_stages - 1):
        yield [b - a for a, b in itertools.pairwise((0, *ends, num_calls))]


def test_time_is_measured_layer_by_layer(monkeypatch):
    monkeypatch.setattr(profiler, "time", CLOCK)
    stack = [Takes(seconds) for seconds in (4, 12, 4, 4, 4)]
    best = plan(stack, balance="time", num_stages=3, remat="none")
    assert best.calls_per_stage == (1, 1, 3)
    # Twice each, forward and backward.
    assert [stage.cost for stage in best.stages] == [8, 24, 24]
    assert "balanced by time, the best of 8 runs of a layer on CPU:0" in str(best)


def test_a_layer_is_partitioned_as_its_plan():
    stack = dense(8, 30, 4, 16)
    for balance in ("flops", "memory"):
        layer = tfgpipe.PipelinedLayer(
            stack, num_stages=2, num_microbatches=4, balance=balance
        )
        layer.build((12, 5))
        found = tuple(len(stage.segment.calls) for stage in layer.stages)
        assert found == plan(dense(8, 30, 4, 16), balance=balance).calls_per_stage


def test_a_layer_that_adds_a_loss_is_measured():
    stack = [layers.Dense(4, activity_regularizer="l2"), layers.Dense(4)]
    best = plan(stack, balance="time")
    assert all(stage.cost > 0 for stage in best.stages)


def test_recomputation_is_a_second_forward(monkeypatch):
    monkeypatch.setattr(profiler, "time", CLOCK)
    stack = [Takes(5), Takes(5)]
    none, recomputed = (
        [stage.cost for stage in plan(stack, balance="time", remat=remat).stages]
        for remat in ("none", "stage")
    )
    assert none == [10, 10]
    assert recomputed == [15, 15]


def test_flops_are_those_of_the_traced_forward_recomputation_and_backward():
    best = plan(dense(8, 8), balance="flops", num_stages=2)
    # Three rows a microbatch. A product forward, one again, and two backward; a bias is
    # added, and its gradient summed.
    for stage, (n, m) in zip(best.stages, [(5, 8), (8, 8)], strict=True):
        products, biases = 2 * 3 * n * m, 3 * m
        assert stage.flops == 4 * products + 3 * biases


def test_memory_counts_weights_gradients_slots_and_activations():
    best = plan(dense(8, 8), balance="memory", remat="none", num_slots=1)
    weights = [4 * (5 * 8 + 8), 4 * (8 * 8 + 8)]
    # Each layer's output is kept, four times three rows of eight, and what a stage
    # receives: the model's input of five, and the first layer's output.
    outputs, inputs = 4 * 3 * 8 * 4, 4 * 3 * 5 * 4
    assert [stage.memory_bytes for stage in best.stages] == [
        3 * weights[0] + inputs + outputs,
        3 * weights[1] + outputs + outputs,
    ]
    stage = plan(dense(8, 8), balance="memory", remat="stage", num_slots=1).stages[1]
    assert stage.memory_bytes == 3 * weights[1] + outputs + outputs / 4


@pytest.mark.parametrize(
    ("schedule", "remat"),
    nightly(
        itertools.product(schedules.NAMES[:4], ["none", "stage"]),
        gate=[
            ("gpipe", "none"),
            ("1f1b", "stage"),
            ("interleaved", "none"),
            ("zero_bubble", "stage"),
            ("zero_bubble", "none"),
        ],
    ),
)
def test_memory_is_of_the_microbatches_that_the_schedule_has_in_flight(schedule, remat):
    K, M = 3, 6
    order = schedules.make(schedule, num_stages=K, num_microbatches=M)
    best = plan(
        dense(8, 8, 8),
        num_stages=K,
        num_microbatches=M,
        remat=remat,
        schedule=schedule if schedule != "interleaved" else order,
    )
    flight = {
        "gpipe": [M] * K,
        "1f1b": [3, 2, 1],
        "interleaved": [3, 2, 1],
        "zero_bubble": [3] * K,
    }[schedule]
    row = 2 * 4  # Of a microbatch of 12 / 6 rows, for each feature.
    state = [4 * 4 * (n * 8 + 8) for n in (5, 8, 8)]
    arrived = [5 * row, 8 * row, 8 * row]
    kept = 8 * row
    late = [1, 2, 3] if schedule == "zero_bubble" else [1] * K
    for k, stage in enumerate(best.stages):
        if remat == "none":
            assert stage.memory_bytes == state[k] + flight[k] * (arrived[k] + kept)
        else:
            assert (
                stage.memory_bytes == state[k] + flight[k] * arrived[k] + late[k] * kept
            )


@pytest.mark.parametrize(
    ("schedule", "remat"),
    nightly(
        itertools.product(
            ["gpipe", "1f1b", "zero_bubble"], ["none", "stage", "layer", "except_last"]
        ),
        gate=[
            ("gpipe", "except_last"),
            ("1f1b", "none"),
            ("zero_bubble", "stage"),
            ("1f1b", "layer"),
        ],
    ),
)
def test_memory_is_balanced_by_what_the_schedule_holds(schedule, remat):
    stack = dense(8, 30, 4, 16, 2, 8)
    arguments = {"num_stages": 3, "remat": remat, "schedule": schedule}
    best = plan(stack, balance="memory", **arguments)
    fullest = [max(recut(best, cut).device_bytes) for cut in cuts(6, 3)]
    assert max(best.device_bytes) == min(fullest)
    given = plan(stack, partition=[1, 2, 3], **arguments)
    assert given.device_bytes == recut(best, [1, 2, 3]).device_bytes


@pytest.mark.parametrize("remat", ["stage", *nightly(["none"])])
def test_stages_that_share_a_device_share_its_memory(remat):
    stack = dense(8, 30, 4, 16, 2, 8, 12, 5)
    order = schedules.interleaved(4, 4, num_devices=2)
    arguments = {"num_stages": 4, "remat": remat, "schedule": order}
    best = plan(stack, balance="memory", **arguments)
    each = {tuple(cut): recut(best, cut).device_bytes for cut in cuts(8, 4)}
    needs = {cut: max(devices) for cut, devices in each.items()}
    assert len(next(iter(each.values()))) == 2
    assert max(best.device_bytes) == min(needs.values())
    free = plan(stack, balance="params", **arguments)
    limit = (needs[free.calls_per_stage] + min(needs.values())) / 2
    within = plan(stack, balance="params", memory_limit=limit, **arguments)
    assert needs[within.calls_per_stage] <= limit
    with pytest.raises(ValueError, match="4 stages on 2 devices was found that stays"):
        plan(stack, memory_limit=min(needs.values()) - 1, **arguments)
    with pytest.raises(
        ValueError, match=f"needs {needs[free.calls_per_stage]:,.0f} bytes on"
    ):
        plan(stack, balance=free.calls_per_stage, memory_limit=limit, **arguments)


def test_a_model_keeps_the_limit_of_its_own_schedule():
    def model(schedule, limit, num_stages=2, num_microbatches=6, **arguments):
        made = tfgpipe.PipelinedModel(
            dense(*[8] * num_stages),
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            schedule=schedule,
            memory_limit=limit,
            remat="none",
            **arguments,
        )
        made.build((24, 5))
        return made

    needs = {
        schedule: max(model(schedule, 1e9).pipelined.plan(sample=X).device_bytes)
        for schedule in ("gpipe", "1f1b")
    }
    assert needs["1f1b"] < needs["gpipe"]
    limit = max(model("1f1b", 1e9).pipelined.plan(batch_size=32).device_bytes)
    model("1f1b", limit)
    with pytest.raises(ValueError, match="stays within"):
        model("gpipe", limit)
    shared = {"num_stages": 4, "devices": ["CPU:0", "CPU:1"]}
    plan = model("interleaved", 1e9, **shared).pipelined.plan(batch_size=32)
    most = max(stage.memory_bytes for stage in plan.stages)
    with pytest.raises(ValueError, match="4 stages on 2 devices"):
        model("interleaved", 1.5 * most, **shared)


@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
def test_what_is_recomputed_is_what_a_traced_backward_computes_again(remat):
    stack = [layers.Dense(5, activation="tanh") for _ in range(4)]
    recorded = tracer.capture_layers(stack, keras.Input((5,)), {})
    part = recorded.graph.segment(slice(0, 4))
    mode = StageOptions(remat=remat_lib.find(remat))
    traced = Stage(0, part, StageCache()).traced(
        {TensorKey(0): tf.TensorSpec((3, 5), tf.float32)}, mode
    )
    programs = traced.without_remat if remat == "none" else traced.with_remat
    operations = programs.backward.function.graph.get_operations()
    products = sum(op.type == "MatMul" for op in operations)
    # The output of the last layer is the input of none.
    again = {"none": [0] * 4, "stage": [1] * 4, "layer": [2, 2, 2, 1]}[remat]
    assert products == sum(again) + 2 * 4  # Two for the gradients of each layer.
    planned = plan(stack, partition=[4], num_stages=1, remat=remat).stages[0]
    without = plan(stack, partition=[4], num_stages=1, remat="none").stages[0]
    forwards = [2 * 3 * 5 * 5 + 3 * 5 + 3 * 5] * 4  # With bias and activation.
    more = sum(n * flops for n, flops in zip(again, forwards, strict=True))
    assert planned.flops - without.flops == more


def test_of_equally_good_cuts_the_one_that_sends_least_is_taken():
    # The same number of parameters, whichever side the narrow value's layer is on.
    stack = [layers.Dense(4), layers.Flatten(), layers.Activation("relu")]
    stack += [layers.GlobalAveragePooling1D(), layers.Flatten(), layers.Dense(4)]
    stack.pop(1)
    x = np.zeros((4, 9, 4), np.float32)
    best = plan(stack, sample=x)
    assert best.stages[1].received_bytes == 4 * 4
    assert best.calls_per_stage in {(3, 2), (4, 1)}


def test_a_skip_is_received_by_the_stage_that_reads_it():
    best = plan(with_skip(), partition=[1, 1, 1, 2], sample=None, num_stages=4)
    row = 4 * 8  # Bytes a feature of a microbatch of 32 / 4 rows.
    assert [stage.received_bytes for stage in best.stages] == [
        0,
        6 * row,
        60 * row,
        6 * row + 6 * row,
    ]


def test_weights_used_twice_count_once():
    shared = layers.Dense(5, name="shared")
    best = plan([shared, layers.Dense(5), shared], partition=[1, 1, 1], num_stages=3)
    assert [stage.parameters for stage in best.stages] == [30, 30, 0]


def test_all_uses_of_a_layer_that_a_step_changes_are_in_one_stage():
    norm = layers.BatchNormalization()
    stack = [norm, layers.Dense(5), norm, layers.Dense(5), layers.Dense(5)]
    for balance in balances.NAMES:
        assert plan(stack, balance=balance).calls_per_stage[0] >= 3
    words = (
        "num_stages=4 .* most 3 stages.*moving_mean', which.* one stage: 'batch_norm"
    )
    with pytest.raises(ValueError, match=words):
        plan(stack, num_stages=4)


# -- what stays -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "balance"),
    nightly(
        itertools.product([dropped, normalised], balances.NAMES),
        gate=[(dropped, "time"), (normalised, "time"), (dropped, "memory")],
    ),
)
def test_planning_changes_no_variable_and_draws_no_seed(make, balance):
    model = keras.Sequential([keras.Input((5,)), *make()])
    before = [v.numpy() for v in model.variables]
    devices = [v.value.device for v in model.variables]
    keras.utils.set_random_seed(7)
    expected = keras.random.normal((3,)), tf.random.normal((3,))
    keras.utils.set_random_seed(7)
    plan(model, balance=balance)
    drawn = keras.random.normal((3,)), tf.random.normal((3,))
    np.testing.assert_array_equal(drawn, expected)
    compare.assert_equal(model.variables, before)
    assert [v.value.device for v in model.variables] == devices


def test_layers_that_are_not_built_stay_so():
    stack = dense(4, 4)
    plan(stack, balance="time")
    assert not any(layer.built for layer in stack)


def test_each_layer_is_measured_on_what_the_one_before_gives():
    seen = []

    class Sees(layers.Layer):
        def call(self, x):
            def note(x):
                seen.append(x)
                return x

            return tf.ensure_shape(tf.numpy_function(note, [x], x.dtype), x.shape)

    ids = np.arange(12).reshape(4, 3) % 5
    stack = [layers.Embedding(5, 2), Sees(), layers.Flatten(), layers.Dense(3)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *stack])
    best = plan(model, balance="time", sample=ids, num_microbatches=2)
    assert sum(best.calls_per_stage) == 4
    measured = [x for x in seen if len(x) == 2]  # Others are those of a probe.
    assert measured
    for x in measured:
        np.testing.assert_array_equal(x, stack[0].embeddings.numpy()[ids[:2]])


# -- what is said ---------------------------------------------------------------------


def test_a_plan_prints_as_a_table():
    text = str(plan(dense(8, 8, 8, 8), memory_limit=2**20))
    assert text.splitlines() == [
        "2 stages, 4 microbatches of 3 examples, remat=stage, balanced by params",
        "stage  layers            parameters  FLOPs   memory  receives  share",
        "0      dense_0, dense_1         120  2.6 k  2.3 KiB       0 B  45.5%",
        "1      dense_2, dense_3         144  3.2 k  2.8 KiB      96 B  54.5%",
        "imbalance 1.091, bubble 24.1%, 2.8 KiB of 1.0 MiB on the fullest device",
    ]


def test_the_bubble_of_even_stages_is_gpipes():
    for K, M in [(1, 1), (2, 4), (3, 4), (4, 16)]:
        best = plan(dense(*[5] * 12), num_stages=K, num_microbatches=M)
        assert best.imbalance == pytest.approx(1)
        assert best.bubble == pytest.approx((K - 1) / (M + K - 1))


def test_the_bubble_of_uneven_stages_is_that_of_their_timeline():
    best = plan(dense(5, 5, 5, 5), partition=[1, 3], num_microbatches=3)
    # Stages of 1 and 3: the second starts after 1 and then runs 3 x 3 of 10.
    assert best.bubble == pytest.approx(1 - (3 * 4) / (2 * 10))


# -- recut ----------------------------------------------------------------------------


def test_measured_times_move_layers_to_the_faster_stage():
    before = plan(dense(*[5] * 8), partition=[4, 4])
    after = before.rebalance(measured=[0.3, 0.1])
    # Layers of 0.3 / 4 and of 0.1 / 4: three of the first weigh 0.225 of 0.4.
    assert after.calls_per_stage == (3, 5)
    assert [stage.cost for stage in after.stages] == pytest.approx([0.225, 0.175])
    assert "balanced by measured stage times" in str(after)


@pytest.fixture
def without_fusion():
    """Has TensorFlow run each operation by itself.

    Where the operations behind a product are in one stage with it, Grappler's remapper
    makes one of them all, which in oneDNN rounds differently; its arithmetic optimizer
    rewrites sums, which with AVX-512 do.
    """
    passes = ("remapping", "arithmetic_optimization")
    tf.config.optimizer.set_experimental_options(dict.fromkeys(passes, False))
    yield
    tf.config.optimizer.set_experimental_options(dict.fromkeys(passes, True))


@pytest.mark.parametrize(
    ("make", "num_replicas"),
    [(dropped, None), *nightly([(dropped, 2), (normalised, 1)])],
)
def test_training_goes_on_to_the_last_bit_after_a_new_cut(
    without_fusion, make, num_replicas
):
    train_with_new_cuts(make, num_replicas, np.testing.assert_array_equal)


@pytest.mark.nightly
def test_training_goes_on_to_rounding_after_a_new_cut_where_operations_are_fused():
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    train_with_new_cuts(dropped, None, close)


def train_with_new_cuts(make, num_replicas, assert_same):
    """Compares three epochs of one cut with an epoch of each of three."""
    rows = X[:8]
    y = np.zeros((8, 4), np.float32)

    def train(cut_anew):
        keras.utils.set_random_seed(1)
        layer = tfgpipe.PipelinedLayer(
            make(),
            **({"num_stages": 3} if num_replicas is None else {}),
            num_microbatches=2,
        )
        model = keras.Sequential([keras.Input((5,)), layer])
        model.compile("adam", "mse", metrics=["mae"])
        history = []
        for step in range(3):
            if cut_anew and step:
                cut = [[1, 1, 3], [3, 1, 1]][step - 1]
                tfgpipe.recut(model, cut)
                assert [len(stage.layers) for stage in layer.stages] == cut
            fitted = model.fit(rows, y, batch_size=4, shuffle=False, verbose=0)
            history.append(fitted.history["loss"])
        return model, layer, history

    if num_replicas is None:
        kept, moved = train(False), train(True)
    else:
        strategy = tfgpipe.PipelineStrategy(num_stages=3, num_replicas=num_replicas)
        with strategy.scope():
            kept, moved = train(False), train(True)
    assert_same(kept[2], moved[2])
    pairs = [(kept[0].variables, moved[0].variables)]
    pairs += [(kept[0].optimizer.variables, moved[0].optimizer.variables)]
    for a, b in itertools.chain(*(zip(*pair, strict=True) for pair in pairs)):
        assert_same(a.numpy(), b.numpy(), err_msg=a.path)
    if num_replicas is None:
        _, layer, _ = moved
        optimizer = moved[0].optimizer
        for stage in layer.stages:
            for weight in stage.weights:
                here = f"CPU:{stage.index}"
                assert weight.value.device.endswith(here)
                name = weight.path.replace("/", "_")
                for slot in optimizer.variables:
                    if slot.name.startswith(f"{name}_"):
                        assert slot.value.device.endswith(here), slot.path


def fitted(*callbacks: keras.callbacks.Callback) -> keras.Model:
    """Trains six batches, and predicts and evaluates after three."""
    keras.utils.set_random_seed(1)
    model = tfgpipe.PipelinedModel(
        normalised(), num_stages=2, num_microbatches=2, partition=[3, 2]
    )
    model.compile("adam", "mse")
    y = np.ones((12, 4), np.float32)
    model.fit(
        X, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks,
        validation_data=(X, y),
    )  # fmt: skip
    return model


class CutsAnew(keras.callbacks.Callback):
    """Moves the layers after the first batch of each epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            first, last = self.model.stages
            counts = [len(stage.segment.calls) for stage in (first, last)]
            tfgpipe.recut(self.model, [counts[0] - 1, counts[1] + 1])


def test_a_callback_may_cut_a_model_anew(without_fusion):
    kept, moved = fitted(), fitted(CutsAnew())
    assert [len(stage.segment.calls) for stage in moved.stages] == [1, 4]
    compare.assert_equal(kept.variables, moved.variables)


def test_a_cut_that_a_device_has_no_memory_for_changes_nothing(monkeypatch):
    model = fitted()
    every = [*model.variables, *model.optimizer.variables]
    before = [v.value for v in every]
    move, moved = keras_internals.variables.initialize_in_scope, []

    def move_three(variable, *arguments):
        if len(moved) == 3:
            raise MemoryError("no memory")
        moved.append(variable)
        move(variable, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(keras_internals.variables, "initialize_in_scope", move_three)
        with pytest.raises(MemoryError):
            tfgpipe.recut(model, [1, 4])
    assert all(v.value is old for v, old in zip(every, before, strict=True))
    assert [len(stage.segment.calls) for stage in model.stages] == [3, 2]
    model.fit(X, np.ones((12, 4), np.float32), verbose=0)


def test_a_model_cut_anew_still_saves_and_loads(tmp_path):
    layer = tfgpipe.PipelinedLayer(normalised(), num_stages=2, num_microbatches=2)
    model = keras.Sequential([keras.Input((5,)), layer])
    model.compile("adam", "mse")
    model.fit(X, np.zeros((12, 4)), verbose=0)
    tfgpipe.recut(model, [1, 4])
    model.fit(X, np.zeros((12, 4)), verbose=0)
    loaded = compare.reloaded(model, tmp_path)
    np.testing.assert_array_equal(loaded(X), model(X))
    assert [len(s.segment.calls) for s in loaded.layers[0].stages] == [1, 4]
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    for variable in loaded.weights:
        variable.assign(variable + 1.0)
    status = tf.train.Checkpoint(model=loaded).restore(path)
    status.assert_existing_objects_matched()
    np.testing.assert_array_equal(loaded(X), model(X))


def test_the_plan_of_a_pipeline_is_that_of_its_cut():
    layer = tfgpipe.PipelinedLayer(dense(5, 5, 5), partition=[1, 2], num_microbatches=4)
    layer.build((None, 5))
    assert layer.plan().calls_per_stage == (1, 2)
    assert layer.plan().profile.num_examples == 8  # Of 32, if unknown.
    assert layer.plan(sample=X).profile.num_examples == 3
    assert layer.plan(batch_size=9).profile.num_examples == 3  # 3, 2, 2 and 2.


class Positions(keras.layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:])

    def call(self, x):
        return keras.ops.expand_dims(self.table, 0)


def test_a_weight_that_is_passed_on_is_not_saved():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(8)(inputs) + Positions()(inputs))
    profile = tfgpipe.plan(model, num_stages=1, num_microbatches=1).profile
    saved = {layer.name: layer.tensors.saved for layer in profile.layers}
    assert saved["positions"] == 0


# -- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("balance", nightly(balances.NAMES, gate=["params", "memory"]))
def test_a_limit_that_nothing_satisfies_says_by_how_much(balance):
    need = max(s.memory_bytes for s in plan(dense(8, 8, 8), balance="memory").stages)
    words = rf"limit=100 bytes; the least.*is {need:,.0f} bytes, {need - 100:,.0f} byte"
    with pytest.raises(ValueError, match=words):
        plan(dense(8, 8, 8), balance=balance, memory_limit=100)
    within = plan(dense(8, 8, 8), balance=balance, memory_limit=need)
    assert max(s.memory_bytes for s in within.stages) <= need


def test_a_given_cut_that_passes_the_limit_says_by_how_much():
    need = max(s.memory_bytes for s in plan(dense(8, 8, 8), partition=[2, 1]).stages)
    words = f"needs {need:,.0f} bytes on one device, {need - 100:,.0f} more than"
    with pytest.raises(ValueError, match=words):
        plan(dense(8, 8, 8), partition=[2, 1], memory_limit=100)


def test_the_layer_itself_keeps_the_limit():
    layer = tfgpipe.PipelinedLayer(
        dense(8, 8, 8), num_stages=2, num_microbatches=4, memory_limit=100
    )
    with pytest.raises(ValueError, match="No partition into 2 stages stays within"):
        layer.build((None, 5))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"balance": "even"}, "'params', 'flops', 'time', 'memory'. Received 'even'"),
        ({"sample": None}, "Received a list of layers and no `sample`"),
        ({"remat": "always"}, "`remat` must be one of"),
        ({"memory_limit": math.nan}, "`memory_limit` must be .* Received nan"),
        ({"num_microbatches": 0}, "at least 1. Received 0"),
        ({"partition": [1, 1]}, "adds up to 2, for 3 calls"),
        ({"partition": ["dense_0", "dense_9"]}, "'dense_9', which no .*dense_0"),
        ({"partition": ["dense_1", "dense_0"]}, "in the order they are called"),
        ({"partition": ["dense_2"]}, "not the last"),
        ({"partition": [1, 1, 1]}, "num_stages=2 and partition=.*makes 3. Leave"),
        ({"num_stages": 4}, "num_stages=4 for a model of 3 calls, .* most 3 stages"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        plan(dense(8, 8, 8), **arguments)


class Encoder(keras.Model):
    """Layers in a `call` of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inside = [keras.layers.Dense(8) for _ in range(3)]

    def call(self, x):
        for layer in self.inside:
            x = layer(x)
        return x


def encoder() -> keras.Model:
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(8, name="embed")(inputs)
    return keras.Model(inputs, Encoder(name="encoder")(hidden), name="deit")


@pytest.mark.parametrize(
    ("make", "num_stages"),
    [
        (tfgpipe.plan, 3),
        (tfgpipe.pipeline, 3),
        (tfgpipe.PipelinedLayer, 3),
        (tfgpipe.PipelinedModel, 4),
        (lambda model, **k: tfgpipe.pipeline(model, schedule="1f1b", **k), 3),
    ],
)
def test_too_many_stages_are_refused_in_the_same_words_everywhere(make, num_stages):
    with pytest.raises(ValueError, match="Every stage holds") as raised:
        make(encoder(), num_stages=num_stages, num_microbatches=2)
    assert str(raised.value) == (
        "Every stage holds at least one call of a layer. Received num_stages="
        f"{num_stages} for a model of 2 calls, 'embed', 'encoder', of which at most 2 "
        "stages can be made. 'encoder' (Encoder) holds 3 layers and 75% of the "
        "parameters and is one call, since it is a model with a `call` of its own: "
        "only models are inlined that do nothing but run the calls that Keras knows. "
        "To split it, record its `call` by `tfgpipe.functional(model, num_calls=...)`, "
        "if that consists of layers and `keras.ops`, give its layers as a list, or "
        "write it as a Functional model. "
        "Use num_stages=2 or fewer."
    )


@pytest.mark.parametrize("make", [tfgpipe.plan, tfgpipe.PipelinedLayer])
def test_a_model_in_a_list_is_one_call_and_is_named(make):
    inner = keras.Sequential([keras.Input((8,)), *Encoder().inside], name="inner")
    listed = [keras.layers.Dense(8, name="first"), inner]
    with pytest.raises(
        ValueError, match=r"2 calls, 'first', 'inner', .* at most 2"
    ) as e:
        make(listed, num_stages=4, num_microbatches=2)
    assert "'inner' (Sequential) holds 3 layers" in str(e.value)
    assert "since it is a model in a list of layers:" in str(e.value)


@pytest.mark.parametrize("make", [tfgpipe.plan, tfgpipe.pipeline])
def test_a_balance_of_numbers_says_what_it_counts(make):
    inputs = x = keras.Input((8,), name="x")
    for i in range(3):
        x = x + keras.layers.Dense(8, name=f"d{i}")(x)
    with pytest.raises(ValueError, match="adds up to 4, for 6 calls: ") as raised:
        make(keras.Model(inputs, x), partition=[2, 2], num_microbatches=2)
    message = str(raised.value)
    assert "6 calls: d0, add, d1, add_1, d2, add_2. Correct the list" in message
    assert message.endswith("each stage but the last, as partition=['d1'].")


def test_a_cut_inside_a_layer_names_the_layer_around():
    class Block(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = layers.Dense(5, name="inner")

        def build(self, shape):
            self.inner.build(shape)

        def call(self, x):
            return self.inner(x)

    with pytest.raises(ValueError, match="'inner', which is inside layer 'block', whe"):
        tfgpipe.PipelinedLayer(
            [Block(name="block"), layers.Dense(5)],
            partition=["inner"],
            num_microbatches=2,
        )


def test_a_size_that_is_not_known_asks_for_a_sample():
    inputs = keras.Input((None, 4), name="tokens")
    model = keras.Model(inputs, layers.Dense(3)(layers.Dense(3)(inputs)))
    words = r"input 'tokens' of shape \(None, None, 4\).*sample=x"
    with pytest.raises(ValueError, match=words):
        plan(model, sample=None)
    x = np.zeros((4, 7, 4), np.float32)
    assert plan(model, sample=x).calls_per_stage == (1, 1)


@pytest.mark.parametrize("measured", [[1.0], [1.0, 0.0], [1.0, -1.0, 2.0]])
def test_measurements_are_one_positive_number_a_stage(measured):
    with pytest.raises(ValueError, match=r"positive time for each stage\. Received"):
        plan(dense(8, 8)).rebalance(measured)


def test_a_new_cut_has_as_many_stages():
    layer = tfgpipe.PipelinedLayer(dense(5, 5, 5), num_stages=2, num_microbatches=2)
    model = keras.Sequential([keras.Input((5,)), layer])
    with pytest.raises(ValueError, match="as many stages as the old one"):
        tfgpipe.recut(model, [1, 1, 1])


def test_recut_wants_a_model_of_one_pipeline():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(5)], name="plain")
    with pytest.raises(ValueError, match="model 'plain' that holds 0 of them"):
        tfgpipe.recut(model, [1, 1])


# -- costs of calls -------------------------------------------------------------------


def test_equal_layers_are_measured_once(monkeypatch):
    measured = []
    fastest = profiler._min_seconds

    def counted(function, *args):
        measured.append(function)
        return fastest(function, *args)

    monkeypatch.setattr(profiler, "_min_seconds", counted)
    stack = [layers.Dense(5) for _ in range(6)]
    recorded = tracer.capture_layers(stack, keras.KerasTensor((3, 5)), {})
    traced = profiler.SegmentProfiler(
        recorded.graph,
        stage_spans([1] * 6),
        {TensorKey(0): tf.TensorSpec((3, 5))},
    )
    work = traced.measure_seconds({TensorKey(0): tf.ones((3, 5))}, "CPU:0")
    assert len(set(work)) == 1
    assert len(measured) == 1 + 2  # A call by itself, a forward, a backward.


@pytest.mark.parametrize("rows", [8, 32])
def test_gradients_take_an_accumulator_or_stacked_rows_and_a_product(rows):
    """Rows of x and dy are stacked where they are no larger than the kernel."""
    width, num_microbatches = 64, 4
    stack = [layers.Dense(width, use_bias=False)]
    given = keras.KerasTensor((rows, width))
    traced = profiler.SegmentProfiler(
        tracer.capture_layers(stack, given, {}).graph,
        stage_spans([1]),
        {TensorKey(0): tf.TensorSpec((rows, width))},
        StageOptions(num_microbatches=num_microbatches, platform="cpu"),
    )
    kernel = width * width * 4
    stacked = 2 * num_microbatches * rows * width * 4 + 4  # And how many there are.
    expected = (stacked, stacked + kernel) if stacked <= kernel + 4 else (kernel,) * 2
    assert traced.step_bytes(recomputes=False) == [expected]


def test_a_cut_by_names_is_the_cut_by_numbers():
    layer = tfgpipe.PipelinedLayer(
        dense(5, 5, 5, 5), partition=["dense_0", "dense_2"], num_microbatches=2
    )
    assert layer.get_config()["partition"] == [1, 2, 1]


@pytest.mark.parametrize("part", [0.0, 0.4, 1.0, None])
def test_auto_counts_the_part_that_there_is_no_room_for(part):
    """Worked out from the plans that save all and nothing; None is without a limit."""
    widths = (64, 16, 64, 16)
    made = keras.Sequential([keras.Input((16,)), *map(keras.layers.Dense, widths)])
    given = {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b"}

    def plan(remat, limit=None):
        return tfgpipe.plan(
            made, partition=(2, 2), remat=remat, memory_limit=limit, **given
        )

    none, stage = plan("none"), plan("stage")
    most, least = none.device_bytes, stage.device_bytes
    assert least[0] < most[0]
    room = max(least)
    if part is not None:
        room = part * least[0] + (1 - part) * most[0]
    auto = plan("auto", None if part is None else room)
    assert auto.device_bytes[0] == pytest.approx(min(room, most[0]))
    parts = [
        min(max((high - room) / (high - low), 0), 1) if low < high else 0
        for low, high in zip(least, most, strict=True)
    ]
    expected = [x * y for x, y in zip(parts, stage.costs.recompute, strict=True)]
    assert auto.costs.recompute == pytest.approx(expected, abs=1e-3)
    assert auto.costs.forward == stage.costs.forward


def two_encoders() -> keras.Model:
    """Returns two encoders of five layers, as models, and a head of two."""

    def encoder(name: str) -> keras.Model:
        x = inputs = keras.Input((8,))
        for i in range(5):
            x = layers.Dense(8, name=f"{name}_{i}")(x)
        return keras.Model(inputs, x, name=name)

    image, text = keras.Input((8,)), keras.Input((8,))
    x = layers.Add()([encoder("image")(image), encoder("text")(text)])
    return keras.Model([image, text], layers.Dense(8)(layers.Dense(8)(x)))


@pytest.mark.parametrize("balance", ["params", "flops"])
def test_encoders_side_by_side_begin_a_stage_each(balance):
    options = {"num_stages": 3, "num_microbatches": 4, "schedule": "1f1b"}
    plan = tfgpipe.plan(two_encoders(), balance=balance, **options)
    assert [stage.layers[0] for stage in plan.stages] == ["image_0", "text_0", "add"]
    flow = schedules.DataFlow(((), (), (0, 1)))
    assert plan.settings.schedule == schedules.one_f_one_b(3, 4, flow=flow)
    # Of a microbatch that stage 1 sends on, stage 0 has the head's work to wait for,
    # less its own next forward.
    first, _, head = (stage.cost for stage in plan.stages)
    work = 4 * sum(stage.cost for stage in plan.stages)
    step = 4 * first + max(head - first / 3, 0)
    assert plan.bubble == pytest.approx(1 - work / (3 * step))
    model = tfgpipe.pipeline(two_encoders(), balance=balance, **options)
    model.build([(None, 8), (None, 8)])
    assert model.pipelined.plan().calls_per_stage == plan.calls_per_stage
    assert model.schedule == plan.settings.schedule
