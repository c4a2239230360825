"""Microbatches and optimizer slots on the host: the same steps, and their places."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import compare
from tests.helpers.identity import assert_same_step
from tests.helpers.identity_models import STACKS
from tests.helpers.marks import nightly
from tfgpipe import schedules
from tfgpipe._compat import executed
from tfgpipe.schedules import Offload
from tfgpipe.schedules.kinds import OFFLOAD, RELOAD

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")


def model(dense=keras.layers.Dense):
    return keras.Sequential(
        [keras.Input((8,)), *(dense(8, "tanh") for _ in "12345678")]
    )


def offloaded(name, **options):
    return Offload(schedules.find(name), most_held=1, **options)


@pytest.mark.parametrize(
    ("name", "stack", "arguments"),
    [
        ("gpipe", "dense", {"remat": "none"}),
        ("gpipe", "dropped", {"remat": "stage", "kernels": "gpu"}),
        ("1f1b", "deferred", {"remat": "layer"}),
        ("1f1b", "masked", {"remat": "products", "unknown": True}),
        ("1f1b", "dense", {"remat": "none", "kernels": "tpu"}),
        ("1f1b", "two_encoders", {"remat": "none", "eagerly": True}),
        ("zero_bubble", "skipping", {"remat": "none"}),
        ("zero_bubble", "regularised", {"remat": "stage", "weights": "rows"}),
        ("interleaved", "tied", {"remat": "none", "devices": ["CPU:0", "CPU:1"]}),
        ("dualpipe_v", "dense", {"remat": "none", "devices": ["CPU:0", "CPU:1"]}),
        ("1f1b", "wide", {"remat": "none", "shards": (2, "gather")}),
    ],
)
@pytest.mark.parametrize("rows", nightly([12], gate=[13]))
def test_steps_are_those_of_the_plain_model(name, stack, arguments, rows):
    policy = offloaded(name)
    given = {**arguments, "num_stages": 4, "num_microbatches": 6}
    assert_same_step(STACKS[stack], rows, schedule=policy, **given)


def pipelined(schedule, **arguments):
    devices = [f"CPU:{p}" for p in range(1, 5)]
    made = tfgpipe.pipeline(
        model(), num_stages=4, num_microbatches=8, schedule=schedule, devices=devices,
        **arguments,
    )  # fmt: skip
    made.compile("adam", "mse")
    return made


def copies(run):
    """Returns the tensors that are sent from device to device, by their devices.

    Edges of control send an empty constant. The first step of a process sends more.
    """
    pipelined("gpipe").fit(X, X, 16, verbose=0)
    pipelined("gpipe").evaluate(X, X, 16, verbose=0)
    found = collections.Counter()
    for graph in executed.partition_graphs(run):
        kinds = {node.name: node.op for node in graph.node}
        for node in graph.node:
            if node.op == "_Send":
                made_by = kinds[node.input[0].partition(":")[0]]
                ends = (node.attr[f"{x}_device"].s[-5:] for x in ("send", "recv"))
                if made_by != "Const":
                    found[tuple(end.decode() for end in ends)] += 1
    return found


@pytest.mark.parametrize(("remat", "tensors"), [("stage", 1), ("none", 3)])
def test_the_host_gets_what_the_plan_says_from_the_stage_itself(remat, tensors):
    """Of each microbatch, the input; without remat, the outputs of two layers too.

    The last stage has the targets as well.
    """
    policy = Offload(schedules.gpipe)
    plain, moved = (pipelined(x, remat=remat) for x in ("gpipe", policy))
    order = moved.schedule.orders
    counts = [sum(a.kind == OFFLOAD for a in actions) for actions in order]
    assert counts == [5, 5, 5, 5]
    before, after = (copies(lambda m=m: m.train_on_batch(X, X)) for m in (plain, moved))
    for p in range(4):
        there, back = (f"CPU:{p + 1}", "CPU:0"), ("CPU:0", f"CPU:{p + 1}")
        moved = (tensors + (p == 3)) * counts[p]
        assert after[there] - before[there] == after[back] - before[back] == moved
    between = [ends for ends in after if "CPU:0" not in ends]
    assert {ends: after[ends] for ends in between} == {
        ends: before[ends] for ends in between
    }


def test_evaluation_copies_nothing():
    plain, moved = (pipelined(x) for x in ("gpipe", Offload(schedules.gpipe)))
    found = [copies(lambda m=m: m.test_on_batch(X, X)) for m in (plain, moved)]
    assert found[0] == found[1]


def test_a_timed_step_holds_no_more_than_planned(tmp_path):
    timed = tfgpipe.TimelineCallback(tmp_path, steps=(1, 2))
    made = pipelined("1f1b+offload")
    made.fit(X, X, 16, epochs=3, callbacks=[timed], verbose=0)
    assert made.schedule.in_flight == (3, 3, 2, 1)
    timeline = timed.timeline
    assert np.all(np.less_equal(timeline.peak_in_flight, made.schedule.in_flight))
    kinds = collections.Counter(span.kind for span in timeline.spans)
    assert kinds[OFFLOAD] == kinds[RELOAD] == 4
    used = {(s.kind, s.stage, s.microbatch): s for s in timeline.spans}
    for (kind, k, m), span in used.items():
        if kind == RELOAD:
            assert used[OFFLOAD, k, m].end <= span.start


def test_callbacks_of_actions_see_copies():
    seen = []

    class See(tfgpipe.ActionCallback):
        def on_action_begin(self, action):
            seen.append(("begin", action.kind))

        def on_action_end(self, action):
            seen.append(("end", action.kind))

    pipelined("1f1b+offload").fit(X, X, 16, callbacks=[See()], verbose=0)
    counts = collections.Counter(seen)
    for kind in (OFFLOAD, RELOAD):
        assert counts["begin", kind] == counts["end", kind] == 4


@pytest.mark.parametrize(
    "schedule",
    [
        *("1f1b+offload", "zbv+offload", "auto+offload"),
        Offload(schedules.find("zero_bubble"), most_held=5, ahead=2),
        Offload(schedules.gpipe).insert(schedules.gpipe(4, 8)),
    ],
    ids=str,
)
def test_it_is_saved(schedule, tmp_path):
    made = tfgpipe.pipeline(
        model(), num_stages=4, num_microbatches=8, schedule=schedule
    )
    loaded = compare.reloaded(made, tmp_path)
    assert loaded.config.schedule == made.config.schedule
    assert loaded.schedule == made.schedule
    again = tfgpipe.PipelineConfig.from_saved(made.config.saved_arguments())
    assert again == made.config


def test_memory_that_1f1b_does_not_fit_into():
    arguments = {"num_stages": 4, "num_microbatches": 8, "remat": "none"}
    plain = tfgpipe.plan(model(), schedule="1f1b", sample=X, **arguments)
    least = tfgpipe.plan(model(), schedule="1f1b+offload", sample=X, **arguments)
    limit = (max(plain.device_bytes) + max(least.device_bytes)) / 2
    arguments |= {"memory_limit": limit, "sample": X}
    with pytest.raises(ValueError, match="`memory_limit`"):
        tfgpipe.plan(model(), schedule="1f1b", **arguments)
    fits = tfgpipe.plan(model(), schedule="1f1b+offload", **arguments)
    assert max(least.device_bytes) <= max(fits.device_bytes) <= limit
    found = max(tfgpipe.simulate(fits.settings.schedule, fits.costs).peak_bytes)
    assert found <= limit
    with pytest.raises(ValueError, match="`memory_limit`"):
        tfgpipe.plan(
            model(),
            schedule="1f1b+offload",
            **{**arguments, "memory_limit": 0.9 * max(least.device_bytes)},
        )


OPTIMIZERS = {
    "adamw": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.5, use_ema=True),
    "momentum": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=2
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("jit_compile", nightly([True], gate=["auto"]))
def test_slots_on_the_host_train_as_the_plain_model(optimizer, jit_compile, tmp_path):
    arguments = {"offload_optimizer": True, "jit_compile": jit_compile}
    devices = [f"CPU:{p}" for p in range(1, 4)]
    double = functools.partial(keras.layers.Dense, dtype="float64")
    pair = compare.model_pair(
        functools.partial(model, double),
        num_stages=3,
        num_microbatches=4,
        devices=devices,
        **arguments,
    )
    for each in pair:
        each.compile(OPTIMIZERS[optimizer](), "mse")
        each.fit(X, X, 16, epochs=3, shuffle=False, verbose=0)
    found = pair[1].optimizer.variables
    compare.assert_close(pair[0].optimizer.variables, found, 1e-9, 1e-9)
    compare.assert_close(pair[0].variables, pair[1].variables, 1e-9, 1e-9)
    assert {x.value.device[-5:] for x in found} == {"CPU:0"}
    assert {x.value.device[-5:] for x in pair[1].weights} == {"CPU:1", "CPU:2", "CPU:3"}
    tfgpipe.recut(pair[1], [2, 3, 3])
    assert {x.value.device[-5:] for x in found} == {"CPU:0"}
    loaded = compare.reloaded(pair[1], tmp_path)
    loaded.fit(X, X, 16, verbose=0)
    assert {x.value.device[-5:] for x in loaded.optimizer.variables} == {"CPU:0"}


@pytest.mark.nightly
def test_slots_of_a_compiled_model_move_to_the_host_and_a_plan_leaves_them_out():
    plain = model()
    plain.compile("adam", "mse")
    plain.fit(X, X, verbose=0)
    arguments = {"num_stages": 2, "num_microbatches": 4, "devices": ["CPU:1", "CPU:2"]}
    plans = []
    for on_host in (False, True):
        made = tfgpipe.pipeline(plain, offload_optimizer=on_host, **arguments)
        made.fit(X, X, verbose=0)
        slots = [x for x in made.optimizer.variables if x.shape.rank]
        where = {"CPU:0"} if on_host else {"CPU:1", "CPU:2"}
        assert {x.value.device[-5:] for x in slots} == where
        plans.append(made.plan())
        plain = model()
        plain.compile("adam", "mse")
        plain.fit(X, X, verbose=0)
    weights = [4 * stage.parameters for stage in plans[0].stages]
    for w, *held in zip(weights, *(plan.stages for plan in plans), strict=True):
        assert held[0].memory_bytes - held[1].memory_bytes == 2 * w


def test_replicas_divide_slots_instead():
    layers = [keras.layers.Dense(4), keras.layers.Dense(4)]
    with (
        tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2).scope(),
        pytest.raises(ValueError, match=r"offload_optimizer=True.*shard_replicas"),
    ):
        tfgpipe.PipelinedModel(layers, num_microbatches=2, offload_optimizer=True)


def test_an_optimizer_of_replicas_is_not_placed_on_the_host():
    with (
        tfgpipe.PipelineStrategy(num_stages=2, num_replicas=2).scope(),
        pytest.raises(ValueError, match=r"on_host=True.*shard_replicas"),
    ):
        tfgpipe.place_optimizer(keras.optimizers.Adam(), on_host=True)


def test_what_is_no_choice_is_refused():
    with pytest.raises(ValueError, match="`offload_optimizer` must be one of"):
        tfgpipe.PipelineConfig(num_microbatches=2, offload_optimizer="host")


def test_an_own_loop_keeps_slots_on_the_host():
    made = tfgpipe.pipeline(model(), num_stages=2, num_microbatches=4)
    optimizer = keras.optimizers.Adam()
    tfgpipe.place_optimizer(optimizer, on_host=True)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((made(X, training=True) - X) ** 2)
    weights = made.trainable_variables
    optimizer.apply(tape.gradient(loss, weights), weights)
    assert {x.value.device[-5:] for x in optimizer.variables} == {"CPU:0"}
