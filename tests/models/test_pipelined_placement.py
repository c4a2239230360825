"""`PipelinedModel`: where it runs, on replicas too, and how it is saved."""

from __future__ import annotations

import collections
import itertools
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare, zoo
from tests.helpers.custom_losses import distance
from tests.helpers.fitted_pairs import (
    FIT,
    NUM_ROWS,
    PIPELINE,
    WEIGHTS,
    X,
    Y,
    assert_fits_the_same,
    assert_same_numbers,
    assert_same_variables,
    assert_trains_the_same,
    both,
    regularised,
    sgd,
    small,
)
from tests.helpers.layer_stacks import AddsLoss
from tests.helpers.marks import nightly
from tests.helpers.placement import device_of, graphs_of
from tests.helpers.recording_layer import LOG, Logs
from tests.helpers.some_schedules import LAST_FIRST
from tests.helpers.token_model import IDS_IN, IDS_OUT, token_loss, tokens
from tests.helpers.zoo import floats

layers = keras.layers

# -- replicas -------------------------------------------------------------------------


def in_scope(strategy, make, **compiled):
    """Returns a model that is made and compiled under a strategy, with weights set."""
    compare.fresh_names()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        model.compile(sgd(), **compiled)
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(rng.uniform(-0.5, 0.5, variable.shape))
    return model


def plain_and_replicated(make, *, schedule="1f1b", **compiled):
    """Returns a plain model, and two replicas of a pipeline."""
    plain = in_scope(tf.distribute.get_strategy(), make, **compiled)
    pipelined = in_scope(
        tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2),
        lambda: tfgpipe.pipeline(make(), num_microbatches=2, schedule=schedule),
        **compiled,
    )
    return plain, pipelined


@pytest.mark.parametrize("schedule", ["zero_bubble", *nightly(["1f1b"])])
def test_replicas_are_one_that_has_all_rows(schedule):
    """With several metrics and weights of rows; `test_data_parallel` has the rest."""
    compiled = {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"]}
    models = plain_and_replicated(small, schedule=schedule, **compiled)
    assert_fits_the_same(models, X, Y, WEIGHTS, batch_size=8)
    scores = [m.evaluate(X, Y, batch_size=8, verbose=0) for m in models]
    assert_same_numbers(*scores)


def test_replicas_of_a_loss_that_leaves_things_out():
    loss = token_loss(0, "sum_over_batch_size")
    models = plain_and_replicated(lambda: tokens(mask=True), loss=loss)
    assert_fits_the_same(models, IDS_IN, IDS_OUT, batch_size=8, epochs=1)


@pytest.mark.nightly
def test_replicas_of_several_losses_that_leave_things_out():
    compiled = {"loss": ["mse"] * 4, "loss_weights": [1.0, 0.5, 2.0, 1.0]}
    models = plain_and_replicated(zoo.masked_outputs, **compiled)
    x = zoo.ZOO["masked_outputs"].data(NUM_ROWS)
    shapes = (6, 3), (4, 3), (3,), (4, 2)
    y = [floats(NUM_ROWS, *shape) for shape in shapes]
    assert_fits_the_same(models, x, y, batch_size=8)


def test_regularizers_count_once_whatever_the_number_of_replicas():
    models = plain_and_replicated(regularised, loss="mse")
    assert_fits_the_same(models, X[:8], Y[:8], batch_size=8)


# -- to and fro between plain and pipelined -------------------------------------------


def trained(make=small, rows=NUM_ROWS, **compiled):
    """Returns a plain model that Adam has trained for a while."""
    model = make()
    arguments = {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", **compiled}
    model.compile(**arguments)
    model.fit(X[:rows], Y[:rows], **FIT)
    return model


@pytest.mark.parametrize("schedule", ["interleaved", *nightly(["1f1b"])])
def test_a_pipeline_of_a_trained_model_goes_on_as_that_would(schedule):
    """With what it was compiled with, and what Adam has noted so far."""
    compiled = {
        "metrics": ["mae", distance],
        "loss_weights": [0.5],
        "steps_per_execution": 2,
    }
    models = []
    for _ in range(2):
        compare.fresh_names()
        keras.utils.set_random_seed(0)
        models.append(trained(**compiled))
    plain, other = models
    arguments = {"num_stages": 2, "num_microbatches": 3, "schedule": schedule}
    devices = ["CPU:0"] if schedule == "interleaved" else None
    pipelined = tfgpipe.pipeline(other, devices=devices, **arguments)
    assert pipelined.optimizer is other.optimizer
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Outputs of the whole")
        assert_fits_the_same((plain, pipelined), X, Y, WEIGHTS)
    assert pipelined.steps_per_execution == 2


@pytest.mark.usefixtures("mixed_precision")
def test_a_pipeline_goes_on_with_the_scale_of_the_loss():
    plain = trained()
    plain.optimizer.dynamic_scale.assign(128.0)
    pipelined = tfgpipe.pipeline(plain, **PIPELINE)
    pipelined.train_on_batch(X, Y)
    assert pipelined.optimizer.dynamic_scale == 128.0
    assert isinstance(pipelined.optimizer.inner_optimizer, keras.optimizers.Adam)


@pytest.mark.usefixtures("mixed_precision")
def test_a_loss_that_a_model_does_not_scale_its_pipeline_does_not_either():
    plain = small()
    plain.compile("sgd", "mse", auto_scale_loss=False)
    optimizer = tfgpipe.pipeline(plain, **PIPELINE).optimizer
    assert isinstance(optimizer, keras.optimizers.SGD)


def test_slots_move_to_the_devices_of_their_stages():
    pipelined = tfgpipe.pipeline(trained(), **PIPELINE)
    places = {
        slot.name: slot.value.device[-5:] for slot in pipelined.optimizer.variables
    }
    for stage in pipelined.stages:
        for weight in stage.weights:
            assert weight.value.device.endswith(f"CPU:{stage.index}")
            for slot in ("momentum", "velocity"):
                name = f"{weight.path.replace('/', '_')}_{slot}"
                assert places[name] == f"CPU:{stage.index}"
    assert set(places.values()) == {"CPU:0", "CPU:1"}


def test_the_plain_model_back_has_the_trained_weights():
    plain = small()
    pipelined = tfgpipe.pipeline(plain, **PIPELINE)
    pipelined.compile(sgd(), "mse")
    pipelined.fit(X, Y, **FIT)
    assert pipelined.unpipelined() is plain
    np.testing.assert_allclose(plain(X), pipelined(X), 1e-5, 1e-5)
    stack = [layers.Dense(4), layers.Dense(3)]
    of_list = tfgpipe.PipelinedModel(stack, **PIPELINE)
    with pytest.raises(RuntimeError, match="known only when it is built"):
        of_list.unpipelined()
    y = of_list(X)
    back = of_list.unpipelined()
    assert isinstance(back, keras.Sequential)
    np.testing.assert_allclose(back(X), y, 1e-5, 1e-5)


def deep() -> keras.Model:
    inputs = x = keras.Input((5,))
    for width in (6, 5, 4):
        x = layers.Dense(width, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def test_a_new_cut_changes_nothing_but_where_things_are():
    models = both(
        deep,
        lambda: {"optimizer": sgd(momentum=0.9), "loss": "mse", "metrics": ["mae"]},
        num_stages=None,
        partition=[1, 3],
    )
    assert_fits_the_same(models, X, Y)
    _, pipelined = models
    tfgpipe.recut(pipelined, [3, 1])
    assert [len(stage.layers) for stage in pipelined.stages] == [3, 1]
    assert_trains_the_same(models, X, Y)
    slots = pipelined.optimizer.variables[2:]
    devices = [slot.value.device[-5:] for slot in slots]
    assert devices == ["CPU:0"] * 6 + ["CPU:1"] * 2


# -- saving ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_list", "schedule"), [(True, "1f1b"), (False, LAST_FIRST)], ids=["list", "own"]
)
def test_a_saved_model_goes_on_training_as_it_would_have(of_list, schedule, tmp_path):
    given = [layers.Dense(4), layers.Dense(3)] if of_list else small()
    model = tfgpipe.PipelinedModel(
        given,
        num_stages=2,
        num_microbatches=2,
        schedule=schedule,
        remat="none",
        devices=["CPU:2", "CPU:1"],
        name="mine",
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    model.fit(X, Y, **FIT)
    loaded = compare.reloaded(model, tmp_path)
    assert loaded.name == "mine"
    assert loaded.schedule == model.schedule
    configs = [{**m.get_config(), "layers": None} for m in (model, loaded)]
    assert configs[0] == configs[1]
    assert_same_variables(model, loaded)
    assert_fits_the_same((model, loaded), X, Y)


def test_a_saved_model_whose_stages_fold_back_goes_on_training(tmp_path):
    """Weights, slots and the first and last stage are on one device, there and back."""

    def make():
        return [layers.Dense(n, activation="tanh") for n in (6, 5, 4, 3)]

    model = tfgpipe.PipelinedModel(
        make(),
        num_stages=4,
        num_microbatches=3,
        schedule="zbv",
        devices=["CPU:2", "CPU:1"],
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(X, Y, **FIT)
    loaded = compare.reloaded(model, tmp_path)
    for each in (model, loaded):
        assert each.schedule.placement == (0, 1, 1, 0)
        moments = each.optimizer._momentums
        for variables in (each.trainable_variables, moments):
            first, second, *_, last = [
                device_of(x.value.device) for x in variables[::2]
            ]
            assert (first, second, last) == (2, 1, 2)
    assert_same_variables(model, loaded)
    assert_fits_the_same((model, loaded), X, Y)


def test_weights_load_whatever_the_number_of_stages(tmp_path):
    path = tmp_path / "model.weights.h5"
    four = tfgpipe.pipeline(
        deep(), num_stages=4, num_microbatches=4, schedule="zero_bubble"
    )
    four.save_weights(path)
    two = tfgpipe.pipeline(deep(), **PIPELINE)
    two.load_weights(path)
    np.testing.assert_allclose(two(X), four(X), 1e-5, 1e-5)
    four.unpipelined().save_weights(path)
    plain = deep()
    plain.load_weights(path)
    np.testing.assert_allclose(plain(X), four(X), 1e-5, 1e-5)


def test_the_configuration_is_what_was_given():
    model = tfgpipe.PipelinedModel(
        small(),
        num_microbatches=4,
        partition=[1, 2],
        schedule="zero_bubble",
        batch_norm="deferred",
        transfer_dtype="bfloat16",
        jit_compile=False,
        name="mine",
    )
    config = model.get_config()
    layer_config = config.pop("layers")
    assert layer_config["class_name"] == "Functional"
    assert config == {
        "name": "mine",
        "trainable": True,
        "num_stages": 2,
        "num_microbatches": 4,
        "balance": "params",
        "partition": [1, 2],
        "memory_limit": None,
        "device_speeds": None,
        "remat": "stage",
        "transfer_dtype": "bfloat16",
        "dtype": None,
        "jit_compile": False,
        "batch_norm": "deferred",
        "added_losses": "mini_batch",
        "offload_optimizer": False,
        "devices": None,
        "schedule": "zero_bubble",
    }
    again = tfgpipe.PipelinedModel.from_config({**config, "layers": layer_config})
    assert again.get_config() == model.get_config()


@pytest.mark.parametrize("balance", [[1, 2, 1], ["dense", "dense_2"]], ids=str)
def test_the_number_of_stages_follows_a_cut(balance):
    stack = [
        layers.Dense(3, name=f"dense{suffix}") for suffix in ("", "_1", "_2", "_3")
    ]
    model = tfgpipe.PipelinedModel(
        stack, balance=balance, num_microbatches=3, schedule="1f1b"
    )
    model(X)
    assert [len(stage.layers) for stage in model.stages] == [1, 2, 1]
    assert model.schedule.num_stages == 3
    assert model.plan(sample=X).calls_per_stage == (1, 2, 1)


def test_compiled_again_masks_still_count():
    """The new loss has not seen a mask; an old trace would not show it one."""
    stack = [layers.Embedding(6, 4, mask_zero=True), layers.Dense(1)]
    model = tfgpipe.PipelinedModel(stack, num_stages=2, num_microbatches=2)
    x = np.array([[1, 2, 3, 4], [1, 2, 3, 5], [1, 0, 0, 0], [2, 0, 0, 0]])
    y = floats(4, 4, 1)
    losses = []
    for some in (model, model, None):
        chosen = some or model.unpipelined()
        chosen.compile("sgd", "mse")
        losses.append(chosen.evaluate(x, y, batch_size=4, verbose=0))
    np.testing.assert_allclose(losses, [losses[-1]] * 3, rtol=1e-6)


# -- placement ------------------------------------------------------------------------


class Scales(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(), initializer="ones", name="w")

    def call(self, x):
        return x * self.w


PLANS = {
    "gpipe": {"num_stages": 3, "schedule": "gpipe"},
    "1f1b": {"num_stages": 3, "schedule": "1f1b"},
    "zero_bubble": {"num_stages": 3, "schedule": "zero_bubble"},
    "interleaved": {
        "num_stages": 4,
        "schedule": "interleaved",
        "devices": ["CPU:0", "CPU:1"],
    },
}


@pytest.mark.parametrize(
    ("name", "eagerly"),
    nightly(
        itertools.product(PLANS, [False, True]),
        gate=[*((name, False) for name in PLANS), ("interleaved", True)],
    ),
)
def test_each_device_runs_the_schedules_actions_in_order_and_once(name, eagerly):
    arguments = {"num_microbatches": 4, "remat": "none", **PLANS[name]}
    num_stages = arguments["num_stages"]
    stack = []
    for k in range(num_stages):
        # Two weights: in the first stage too a chain of gradients leads past `Logs`.
        stack += [Scales(), Scales(), Logs(k)]
    model = tfgpipe.PipelinedModel(stack, **arguments, partition=[3] * num_stages)
    model.compile(sgd(learning_rate=0.0), "mse", run_eagerly=eagerly)
    # Row m holds m, and is the whole of microbatch m.
    x = np.arange(4.0, dtype="float32")[:, None] * np.ones((1, 2), "float32")
    model.train_on_batch(x, x)
    LOG.clear()
    model.train_on_batch(x, x)
    for device, actions in enumerate(model.schedule.orders):
        stages = {action.stage for action in actions}
        ran = [entry for entry in LOG if entry[1] in stages]
        wanted = [
            (action.kind.name.removesuffix("_input"), action.stage, action.microbatch)
            for action in actions
            if action.kind.name != "backward_weight"
        ]
        assert ran == wanted, device


def calls_by_device(model, *shapes) -> dict[str, list]:
    """Returns the calls of programs in the graph of a step, for each device."""
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    specs = [tf.TensorSpec(shape) for shape in shapes]
    model.train_on_batch(*(np.ones(shape, "float32") for shape in shapes))
    graph = step.get_concrete_function(*specs).graph
    found: dict[str, list] = {}
    for op in graph.get_operations():
        if op.type == "PartitionedCall" and "stage_" in op.get_attr("f").name:
            found.setdefault(op.device[-5:], []).append(op)
    return found


@pytest.mark.parametrize("name", nightly(PLANS, gate=["zero_bubble", "interleaved"]))
def test_programs_are_on_their_devices_chained_in_the_schedules_order(name):
    arguments = {"num_microbatches": 4, **PLANS[name]}
    num_stages = arguments["num_stages"]
    stack = [layers.Dense(3) for _ in range(2 * num_stages)]
    model = tfgpipe.PipelinedModel(stack, **arguments)
    model.compile(sgd(), "mse")
    found = calls_by_device(model, (8, 3), (8, 3))
    assert sorted(found) == [f"CPU:{p}" for p in range(model.schedule.num_devices)]
    for device, calls in found.items():
        actions = model.schedule.orders[int(device[-1])]
        kinds = [re.search(r"stage_(\w+)_\d+$", c.get_attr("f").name)[1] for c in calls]
        assert kinds == [action.kind.name for action in actions]
        # Each waits for the one before it, and for nothing else but its data.
        for before, call in zip([None, *calls], calls, strict=False):
            waiting = [op for op in call.control_inputs if op.type != "ControlTrigger"]
            assert set(waiting) <= {before}
            waits = [*call.control_inputs, *(x.op for x in call.inputs)]
            assert before is None or before in waits


@pytest.mark.parametrize("name", nightly(PLANS, gate=["zero_bubble", "interleaved"]))
def test_only_boundaries_and_scalars_cross_between_devices(name):
    """No weight, slot or gradient of a weight; targets go to the last stage alone."""
    arguments = {"num_microbatches": 4, **PLANS[name]}
    stack = [layers.Dense(32, activation="relu") for _ in range(2 * 4)]
    model = tfgpipe.PipelinedModel(stack, **arguments)
    model.compile("adam", "mse", metrics=["mae"])
    x = np.ones((8, 32), "float32")
    graphs = graphs_of(lambda: model.fit(x, x, batch_size=8, verbose=0))
    sent: collections.Counter = collections.Counter()
    targets = []
    for graph in graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            ends = [node.attr[end].s for end in ("send_device", "recv_device")]
            if node.op != "_Send" or ends[0] == ends[1]:
                continue
            there = tuple(device_of(end.decode()) for end in ends)
            source, _, index = node.input[0].partition(":")
            program = re.search(r"stage_([a-z_]+)_", nodes[source].attr["f"].func.name)
            assert not re.search("kernel|bias|IdentityN", source), source
            if nodes[source].op == "Identity" and "/input/" in source:
                targets.append(there)
            elif program and not index:
                sent[(program[1].removesuffix("_input"), *there)] += 1
            elif program:
                # What follows the first result is the new state of the metrics.
                assert program[1] == "forward", (node.input[0], there)
                assert there[0] == model.schedule.placement[-1]
    places = model.schedule.placement
    wanted: collections.Counter = collections.Counter()
    for a, b in itertools.pairwise(places):
        wanted["forward", a, b] += 4
        wanted["backward", b, a] += 4
    assert sent == wanted
    assert targets == [(0, places[-1])]


@pytest.mark.parametrize("loss", ["mse", None])
def test_updates_are_computed_where_the_weights_are(loss):
    stack = [layers.Dense(4), layers.Dense(3), AddsLoss()]
    model = tfgpipe.pipeline(keras.Sequential([keras.Input((5,)), *stack]), **PIPELINE)
    model.compile("adam", loss)
    graphs = graphs_of(lambda: model.fit(X, Y, batch_size=10, verbose=0))
    roots: collections.Counter = collections.Counter()
    for node in (node for graph in graphs for node in graph.node):
        if node.op == "Sqrt":  # Adam takes two for each weight.
            roots[device_of(node.device)] += 1
    assert roots == {0: 2 * 2, 1: 2 * 2}


def test_an_action_that_makes_nothing_keeps_its_place():
    """Its stage has one layer and no input gradients: all is left to the weights."""
    stack = [layers.Dense(3), layers.Dense(3)]
    arguments = {"num_stages": 2, "num_microbatches": 2, "schedule": "zero_bubble"}
    model = tfgpipe.PipelinedModel(stack, **arguments)
    model.compile(sgd(), "mse")
    calls = calls_by_device(model, (4, 3), (4, 3))["CPU:0"]
    making = [call for call in calls if call.outputs]
    assert len(making) == len(calls) - 2
    for before, call in itertools.pairwise(making):
        assert before in [*call.control_inputs, *(x.op for x in call.inputs)]
