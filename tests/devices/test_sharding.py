"""Stages in shards: that they compute what the layers alone do, and where."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.layer_stacks import REMAT_MODES
from tests.helpers.marks import nightly
from tests.helpers.placement import device_of, graphs_of
from tests.helpers.sharded_dense import Columns
from tfgpipe import schedules
from tfgpipe.devices import names, sharding
from tfgpipe.graph import partitioner

layers = keras.layers
WIDTH = 6


def stack(num_shards, depth=1):
    """Layers in shards, and some that are not, a dropout among them."""
    return [
        layers.Dense(WIDTH, activation="tanh"),
        *(Columns(7 + i, num_shards=num_shards) for i in range(depth)),
        layers.LayerNormalization(),
        Columns(5, num_shards=num_shards),
        layers.Dense(3),
    ]


def data(rows, width=WIDTH, dtype="float64"):
    return np.random.default_rng(rows).normal(size=(rows, width)).astype(dtype)


def trained_alike(plain, pipelined, *, rtol=1e-12, atol=1e-13):
    """Asserts that two models have the same weights and slots."""
    compare.assert_close(plain.variables, pipelined.variables, rtol, atol)


# -- the layer that it is tried with --------------------------------------------------


def test_columns_are_a_dense_layer(floatx):
    floatx("float64")
    dense, columns = layers.Dense(5), Columns(5, num_shards=3)
    x = tf.constant(data(4))
    dense(x), columns(x)
    for whole, sharded in zip(dense.weights, columns.sharded_weights, strict=True):
        sizes = np.cumsum(columns.sizes)[:-1]
        for part, value in zip(
            sharded.parts, np.split(whole.numpy(), sizes, -1), strict=True
        ):
            part.assign(value)
    expected, received = (
        compare.run(model, x.numpy(), graph=False) for model in (dense, columns)
    )
    np.testing.assert_allclose(received.outputs, expected.outputs, rtol=1e-13)
    whole = [*expected.weight_grads.values(), *expected.input_grads]
    parts = list(received.weight_grads.values())
    joined = [np.concatenate(parts[:3], 1), np.concatenate(parts[3:])]
    compare.assert_allclose([*joined, *received.input_grads], whole, rtol=1e-12)


# -- what is computed -----------------------------------------------------------------


def test_inference_is_the_plain_models(floatx):
    floatx("float64")
    plain, pipelined = compare.pair(
        lambda: stack(2), (WIDTH,), "float64", num_stages=2, num_microbatches=3
    )
    x = data(7)
    a, b = (m.predict(x, batch_size=4, verbose=0) for m in (plain, pipelined))
    np.testing.assert_allclose(b, a, rtol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "num_shards"),
    nightly(
        [*((name, 2) for name in schedules.NAMES[:4]), ("1f1b", 3)],
        gate=[("interleaved", 2), ("zero_bubble", 3)],
    ),
)
def test_weights_and_slots_after_steps_of_adam(schedule, num_shards, floatx):
    floatx("float64")
    plain = compare.plain_model(lambda: stack(num_shards), (WIDTH,), "float64")
    compare.fresh_names()
    interleaved = schedule == "interleaved"
    pipelined = tfgpipe.PipelinedModel(
        keras.Sequential([keras.Input((WIDTH,)), *stack(num_shards)]),
        num_stages=4 if interleaved else 2,
        num_microbatches=4,
        schedule=schedule,
        devices=[f"CPU:{i}" for i in range(2 * num_shards)] if interleaved else None,
    )
    compare.copy_state(plain, pipelined)
    x, y = data(12), data(12, 3)
    for model in (plain, pipelined):
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
        model.run_eagerly = model is plain  # To trace it takes longer than its steps.
        model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    trained_alike(plain, pipelined)
    pairs_of_slots = zip(
        plain.optimizer.variables, pipelined.optimizer.variables, strict=True
    )
    for a, b in pairs_of_slots:
        compare.close(a.numpy(), b.numpy(), a.path, 1e-11, 1e-13)


@pytest.mark.parametrize("owns_loss", [True, *nightly([False])])
def test_replicas_of_stages_in_shards(owns_loss, floatx):
    """Two replicas of two stages on two devices each: eight devices."""
    floatx("float64")
    plain = compare.plain_model(lambda: stack(2), (WIDTH,), "float64")
    compare.fresh_names()
    strategy = tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2, num_shards=2)
    assert strategy.mesh.shape == (2, 2, 2)
    with strategy.scope():
        if owns_loss:
            pipelined = tfgpipe.PipelinedModel(
                keras.Sequential([keras.Input((WIDTH,)), *stack(2)]),
                num_microbatches=2,
                schedule="1f1b",
            )
        else:
            pipelined = compare.pipelined_model(
                lambda: stack(2), (WIDTH,), "float64", num_microbatches=2
            )
        pipelined.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    plain.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    compare.copy_state(plain, pipelined)
    plain.run_eagerly = True
    x, y = data(16), data(16, 3)
    for model in (plain, pipelined):
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    trained_alike(plain, pipelined)
    kernel = next(v for v in pipelined.trainable_variables if v.name == "kernel_1")
    copies = strategy.experimental_local_results(kernel.value)
    assert [device_of(copy.device) for copy in copies] == [1, 5]


def test_a_loop_around_shards_is_on_one_device(floatx):
    floatx("float64")

    class Loops(Columns):
        def call(self, x):
            def again(i, y):
                return i + 1, super(Loops, self).call(y)

            return tf.while_loop(lambda i, y: i < 3, again, (0, x))[1]

    def make():
        return [Columns(WIDTH, num_shards=2), Loops(WIDTH, num_shards=2)]

    plain, pipelined = compare.pair(
        make, (WIDTH,), "float64", num_stages=1, num_microbatches=2
    )
    x = data(4)
    compare.assert_runs_the_same(plain, pipelined, x, rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("mixed_precision")
def test_a_step_of_shards_in_half_precision_is_the_plain_one():
    def make():
        return [*stack(2), layers.Activation("linear", dtype="float32")]

    plain, pipelined = compare.pair(
        make, (WIDTH,), "float32", num_stages=2, num_microbatches=2
    )
    x = data(8, dtype="float32")
    expected, received = compare.run(plain, x, graph=False), compare.run(pipelined, x)
    assert {g.dtype.name for g in received.weight_grads.values()} == {"float32"}
    compare.assert_same(expected, received, rtol=0.0, atol=2**-7)


def test_a_layer_in_shards_that_is_used_twice(floatx):
    floatx("float64")

    def make():
        twice = Columns(WIDTH, num_shards=2)
        return [twice, layers.Activation("tanh"), twice, layers.Dense(2)]

    plain, pipelined = compare.pair(
        make, (WIDTH,), "float64", partition=[2, 2], num_microbatches=2
    )
    x = data(4)
    compare.assert_runs_the_same(plain, pipelined, x, rtol=1e-12, atol=1e-13)


def test_masks_are_found_on_one_device():
    """The loss wants to know all masks before the first microbatch."""

    def make():
        inputs = keras.Input((4,), dtype="int32")
        x = layers.Embedding(9, WIDTH, mask_zero=True)(inputs)
        x = Columns(WIDTH, num_shards=2)(layers.LayerNormalization()(x))
        return keras.Model(inputs, layers.Dense(9)(x))

    plain, pipelined = compare.model_pair(make, num_stages=2, num_microbatches=3)
    x = np.random.default_rng(0).integers(0, 9, (6, 4))
    for model in (plain, pipelined):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss, jit_compile=False)
        model.fit(x, x, batch_size=6, epochs=2, verbose=0)
    trained_alike(plain, pipelined, rtol=1e-5, atol=1e-6)


def test_cutting_anew_moves_parts_and_their_slots():
    model = compare.pipelined_model(
        lambda: [Columns(WIDTH, num_shards=2) for _ in range(3)],
        (WIDTH,),
        "float32",
        partition=[1, 2],
        num_microbatches=2,
    )
    model.compile("adam", "mse", jit_compile=False)
    x = data(4, dtype="float32")
    model.optimizer.build(model.trainable_variables)
    tfgpipe.recut(model, [2, 1])
    model.fit(x, x, verbose=0)
    (layer,) = model.layers
    for weight in layer.stages[0].weights[4:]:
        slots = [
            v
            for v in model.optimizer.variables
            if v.name.startswith(weight.path.replace("/", "_") + "_")
        ]
        shard = layer.stages[0].shard_indices[weight]
        assert len(slots) == 2
        assert {device_of(v.value.device) for v in (weight, *slots)} == {shard}


def test_steps_are_timed(tmp_path):
    model = tfgpipe.PipelinedModel(
        keras.Sequential([keras.Input((WIDTH,)), *stack(2)]),
        num_stages=2,
        num_microbatches=2,
    )
    model.compile("adam", "mse", jit_compile=False)
    timed = tfgpipe.TimelineCallback(tmp_path, steps=(2, 2))
    x = data(4, dtype="float32")
    model.fit(x, x[:, :3], batch_size=2, callbacks=[timed], verbose=0)
    assert len(timed.timeline.spans) >= 2 * 2 * 2


@pytest.mark.parametrize("form", ["keras", "weights.h5"])
def test_saving_and_loading(form, tmp_path):
    model = compare.pipelined_model(
        lambda: stack(2), (WIDTH,), "float32", num_stages=2, num_microbatches=2
    )
    x = data(4, dtype="float32")
    expected = model.predict(x, verbose=0)
    path = str(tmp_path / f"model.{form}")
    if form == "keras":
        model.save(path)
        loaded = keras.saving.load_model(path)
    else:
        model.save_weights(path)
        loaded = compare.pipelined_model(
            lambda: stack(2), (WIDTH,), "float32", num_stages=1, num_microbatches=2
        )
        loaded.load_weights(path)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, rtol=1e-6)
    (layer,) = loaded.layers
    assert layer.mesh.num_shards == 2


# -- where it is computed -------------------------------------------------------------

WIDE, ROWS = 32, 2


def wide(num_shards=2):
    """Weights that no value made of a microbatch is as large as."""
    return [
        Columns(WIDE, num_shards=num_shards),
        layers.Activation("tanh"),
        Columns(WIDE, num_shards=num_shards),
        layers.Dense(4),
    ]


def step_graph(num_microbatches, remat="stage"):
    """Returns the graph of a forward and backward of two stages in two shards."""
    layer = tfgpipe.PipelinedLayer(
        wide(), num_stages=2, num_microbatches=num_microbatches, remat=remat
    )
    model = keras.Sequential([keras.Input((WIDE,)), layer])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    rows = ROWS * num_microbatches
    return step.get_concrete_function(tf.TensorSpec([rows, WIDE])).graph


@pytest.mark.parametrize(
    ("num_microbatches", "policy", "remat"),
    nightly(
        [
            (*way, remat)
            for way in [(1, "float32"), (3, "float32"), (3, "mixed_float16")]
            for remat in REMAT_MODES
        ],
        gate=[
            (1, "float32", "none"),
            (3, "mixed_float16", "layer"),
            (3, "float32", "except_last"),
            (3, "float32", "products"),
        ],
    ),
)
def test_no_weight_goes_from_device_to_device(
    num_microbatches, policy, remat, mixed_precision
):
    keras.config.set_dtype_policy(policy)
    crossing = []
    for op in step_graph(num_microbatches, remat).get_operations():
        # TensorFlow drops the copies that nobody reads, of all arguments of a gradient.
        for x in op.inputs if op.type != "IdentityN" else ():
            if x.op.device and op.device and x.op.device != op.device:
                crossing.append((op.name, x.name, x.shape.num_elements()))
    assert crossing
    most = num_microbatches * ROWS * WIDE
    assert not [each for each in crossing if each[2] > most], crossing


def test_a_copy_to_another_device_is_no_part_of_a_call():
    operations = step_graph(2).get_operations()
    moves = [
        op
        for op in operations
        if op.type == "Identity" and op.inputs[0].op.type == "PartitionedCall"
        if op.device not in ("", op.inputs[0].op.device)
    ]
    # For the second shard of two stages each, for two microbatches each: what goes
    # in, again when it is recomputed, and the gradient of what comes out.
    assert len(moves) == 2 * 2 * 3
    assert {device_of(op.device) for op in moves} == {1, 3}


def test_actions_wait_for_those_before_on_all_shards():
    """Whatever a forward of the second microbatch does comes after all of the first."""
    operations = step_graph(2).get_operations()
    calls = [
        op for op in operations if op.type == "PartitionedCall" if "forward" in op.name
    ]
    graph = {
        op.name: [
            *(x.name for x in op.inputs),
            *(f"^{x.name}" for x in op.control_inputs),
        ]
        for op in operations
    }
    before = {}
    for name, inputs in partitioner.topological_order(graph).items():
        behind = set(map(partitioner.op_name, inputs))
        before[name] = behind.union(*(before[x] for x in behind))
    for devices in ({0, 1}, {2, 3}):
        mine = [op for op in calls if device_of(op.device) in devices]
        first, second = mine[: len(mine) // 2], mine[len(mine) // 2 :]
        assert {device_of(op.device) for op in first} == devices
        for op in second:
            assert {x.name for x in first} <= before[op.name]


def test_parts_slots_products_and_updates_are_on_the_devices_of_their_shards():
    model = compare.pipelined_model(
        wide, (WIDE,), "float32", num_stages=2, num_microbatches=2
    )
    model.compile("adam", "mse", jit_compile=False)
    x = np.ones((4, WIDE), "float32")
    graphs = graphs_of(lambda: model.fit(x, x[:, :4], batch_size=4, verbose=0))
    (layer,) = model.layers
    where = {}
    for stage in layer.stages:
        for variable in stage.weights:
            shard = stage.shard_indices.get(variable, 0)
            assert device_of(variable.value.device) == 2 * stage.index + shard
            where[variable.path.replace("/", "_")] = 2 * stage.index + shard
    slots = collections.Counter()
    for slot in model.optimizer.variables:
        for path, device in where.items():
            if slot.name.startswith(path + "_"):
                assert device_of(slot.value.device) == device, slot.name
                slots[device] += 1
    assert slots == {0: 4, 1: 4, 2: 8, 3: 4}
    updates = collections.Counter()
    for node in (node for graph in graphs for node in graph.node):
        if node.op in ("AssignAddVariableOp", "AssignSubVariableOp"):
            updates[device_of(node.device)] += 1
    assert all(updates[device] >= 3 * slots[device] / 2 for device in range(4))


def test_pieces_hold_the_products_of_one_shard_and_are_shared():
    graph = step_graph(3)
    calls = [op for op in graph.get_operations() if op.type == "PartitionedCall"]
    functions = collections.defaultdict(set)
    for op in calls:
        functions[op.get_attr("f").name].add(device_of(op.device))
    # One piece multiplies in the forward of either shard, of either stage.
    assert {0, 1, 2, 3} in functions.values()
    library = {f.signature.name: f for f in graph.as_graph_def().library.function}

    def count(name):
        total = 0
        for node in library[name].node_def:
            total += node.op == "MatMul"
            if node.op == "PartitionedCall":
                total += count(node.attr["f"].func.name)
        return total

    multiplied = collections.Counter()
    for op in calls:
        multiplied[device_of(op.device)] += count(op.get_attr("f").name)
    # For each microbatch: forward, again, and two gradients (one, of the first stage,
    # if nobody wants that of the input); more in the last stage, of a dense layer.
    assert multiplied[1] == multiplied[0] > 0
    assert multiplied[2] > multiplied[3] >= multiplied[1]


# -- what it is planned by -------------------------------------------------------------


def planned(num_shards, **arguments):
    some = [Columns(WIDE, num_shards=num_shards, name=f"c{i}") for i in range(4)]
    inputs = np.ones((4, WIDE), "float32")
    return tfgpipe.plan(
        some, num_stages=2, num_microbatches=2, sample=inputs, **arguments
    )


def test_a_plan_counts_parts_on_their_devices():
    whole, halves, thirds = map(planned, (1, 2, 3))
    for plan, share in ((halves, 1 / 2), (thirds, 11 / WIDE)):
        assert plan.calls_per_stage == whole.calls_per_stage == (2, 2)
        for a, b in zip(whole.stages, plan.stages, strict=True):
            assert a.parameters == b.parameters
            # Weights, gradients and slots are most of it; activations of the lead stay.
            assert share < b.memory_bytes / a.memory_bytes < share + 0.05
    assert "2 stages in 2 shards, 2 microbatches" in str(halves)
    assert 'Columns.kernel  32 x 32  (None, "shard")           512  c0 .. c3' in str(
        halves
    )


def test_time_is_measured_on_one_device():
    plan = planned(2, balance="time")
    assert all(stage.cost > 0 for stage in plan.stages)


# -- what it is told by ---------------------------------------------------------------


def test_a_spec_reads_as_it_is_written():
    spec = tfgpipe.ShardingSpec(None, "shard")
    assert repr(spec) == 'ShardingSpec(None, "shard")'
    assert str(spec) == '(None, "shard")'
    assert str(tfgpipe.ShardingSpec("shard")) == '("shard",)'
    assert spec == tfgpipe.ShardingSpec(None, "shard")
    layer = Columns(4, num_shards=2)
    layer.build((None, 3))
    kernel, bias = layer.sharded_weights
    assert sharding.sharding_spec(kernel) == spec
    assert sharding.sharding_spec(bias) == tfgpipe.ShardingSpec("shard")


def test_a_spec_of_an_axis_that_no_mesh_has():
    with pytest.raises(
        ValueError, match=r"are replica, stage, shard\. Received 'model'"
    ):
        tfgpipe.ShardingSpec("model", None)


def test_layers_of_different_numbers_of_shards():
    some = [Columns(4, num_shards=2, name="a"), Columns(6, num_shards=3, name="b")]
    with pytest.raises(ValueError, match="Received 2 of 'a', 3 of 'b'"):
        tfgpipe.PipelinedLayer(some, num_stages=2, num_microbatches=2)


def test_a_strategy_of_another_number_of_shards():
    with (
        tfgpipe.PipelineStrategy(num_stages=2, num_shards=2).scope(),
        pytest.raises(ValueError, match=r"in 3 shards under a strategy of 2.*num_sha"),
    ):
        tfgpipe.PipelinedLayer(stack(3), num_microbatches=2)


def test_more_devices_are_needed_than_there_are():
    with pytest.raises(
        ValueError,
        match=r"3 stages x 1 replicas x 3 shards need 9 devices.*Received 8.*cpus\(9\)",
    ):
        tfgpipe.PipelinedLayer(stack(3), num_stages=3, num_microbatches=2)


def test_devices_come_in_groups():
    with pytest.raises(
        ValueError, match=r"of 2 shards have as many.*Received 3: CPU:0"
    ):
        tfgpipe.PipelinedModel(
            stack(2), num_microbatches=2, devices=["CPU:0", "CPU:1", "CPU:2"]
        )


def test_as_many_stages_as_there_are_devices_for():
    layer = tfgpipe.PipelinedLayer(stack(3), num_microbatches=2)
    assert layer.mesh.shape == (1, 2, 3)
    assert names.short_name(layer.mesh.shard_devices(0, 1)[2]) == "CPU:5"


def test_xla_is_for_one_device():
    with pytest.raises(ValueError, match="XLA compiles for one device"):
        tfgpipe.PipelinedLayer(stack(2), num_microbatches=2, jit_compile=True)


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (keras.optimizers.Adam, "clipnorm=1.0"),
        (keras.optimizers.Lamb, "Lamb"),
        (keras.optimizers.SGD, None),
    ],
)
def test_optimizers_of_whole_weights_are_warned_of(optimizer, named, recwarn):
    layers = [Columns(4, num_shards=2)]
    model = tfgpipe.PipelinedModel(layers, num_stages=1, num_microbatches=1)
    arguments = {"clipnorm": 1.0} if named == "clipnorm=1.0" else {}
    model.compile(optimizer(global_clipnorm=None, **arguments), "mse")
    said = [str(w.message) for w in recwarn if "as if they were" in str(w.message)]
    assert [named in text for text in said] == ([True] if named else [])


class Late(keras.layers.Layer):
    """Makes a layer in shards only when it is built."""

    def build(self, shape):
        self.columns = Columns(4, num_shards=2)
        self.columns.build(shape)

    def call(self, x):
        return self.columns(x)


def test_layers_that_are_made_late():
    words = "turn out to be in 2 shards when they are built. Have them make"
    layer = tfgpipe.PipelinedLayer([Late()], num_stages=1, num_microbatches=1)
    with pytest.raises(ValueError, match=words):
        layer.build((None, 4))
    with tfgpipe.PipelineStrategy(num_stages=1, num_shards=2).scope():
        layer = tfgpipe.PipelinedLayer([Late()], num_microbatches=1)
        layer.build((None, 4))
    parts = layer.stages[0].layers[0].columns.sharded_weights[0].parts
    assert [part.value.device[-5:] for part in parts] == ["CPU:0", "CPU:1"]
