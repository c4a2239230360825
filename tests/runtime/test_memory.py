"""What is kept between the forward and the backward."""

from __future__ import annotations

import collections
import json
import weakref

import keras
import pytest
import tensorflow as tf

import tfgpipe
from benchmarks.worker import Side, Worker
from tests.helpers.subprocesses import interpret
from tests.helpers.traced_stages import dense, products, traced
from tfgpipe.runtime.stage_run import StageRun

# Runs a training step for each choice of recomputation in a process of its own, and
# prints by how much its resident memory had grown at its highest after each.
CHILD = """
import json, re, sys
import tfgpipe
tfgpipe.make_logical_cpus(2)
import keras, tensorflow as tf
def peak():
    # Not `ru_maxrss`, which a process inherits from the one that started it.
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1])
def made(remat):
    layers = [keras.layers.Dense(256, activation="gelu") for _ in range(16)]
    layer = tfgpipe.PipelinedLayer(
        layers, num_stages=2, num_microbatches=8, remat=remat
    )
    model = keras.Sequential([keras.Input((256,)), layer])
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True))
        return [tf.norm(g) for g in tape.gradient(loss, model.trainable_variables)]
    step(tf.ones((8, 256)))
    return step
rows, *remats = sys.argv[1:]
x = tf.ones((int(rows), 256))
steps = [made(remat) for remat in remats]
before = peak()
growth = []
for step in steps:
    step(x)
    growth.append(peak() - before)
print(json.dumps(growth))
"""


def peak_growth(rows: int, *remats: str, few: int = 0) -> list[int]:
    """Returns the growth of each; steps of fewer operations than `few` are inlined."""
    # oneDNN's pool grows in steps of its own, and keeps what is freed.
    system = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}
    system["TFGPIPE_FEW_OPERATIONS"] = str(few)
    child = interpret(CHILD, str(rows), *remats, **system)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.mark.parametrize("few", [0, 2**12])
def test_rematerialisation_at_least_halves_peak_memory(few):
    """In one process, so that what takes more comes later."""
    rows = 4096
    recomputed, kept = peak_growth(rows, "stage", "none", few=few)
    # 16 layers x (input, pre-activation) x rows x 256 floats.
    assert kept > 16 * 2 * rows * 256 * 4
    assert recomputed < kept / 2


@pytest.mark.nightly
def test_rematerialisation_at_least_halves_peak_memory_one_by_one():
    rows = 8192
    (kept,) = peak_growth(rows, "none")
    # 16 layers x (input, pre-activation) x rows x 256 floats.
    assert kept > 16 * 2 * rows * 256 * 4
    for kind in ("stage", "layer"):
        assert peak_growth(rows, kind)[0] < kept / 2, kind


SIDE = Side(workload="mlp", num_stages=2, num_microbatches=4, schedule="gpipe")


@pytest.mark.nightly
@pytest.mark.parametrize("onednn", ["0", "1"])
def test_measured_memory_is_that_of_the_formula_with_onednn_or_without(
    monkeypatch, onednn
):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", onednn)
    with Worker(SIDE, for_memory=True) as worker:
        memory, expected = worker.memory(), worker.expected_memory()
    assert (memory.peak - memory.before) / expected == pytest.approx(1, abs=0.15)


@pytest.mark.nightly
def test_a_measurement_that_cannot_be_true_is_refused(monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    monkeypatch.delenv("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", raising=False)
    with Worker(SIDE) as worker:
        words = "is not the memory of a step.*TF_ONEDNN_USE_SYSTEM_ALLOCATOR=1"
        with pytest.raises(RuntimeError, match=words):
            worker.memory()


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_recomputing_forward_hands_on_its_output_and_nothing_else(per_layer):
    remat = "layer" if per_layer else "stage"
    _, stage = traced(dense(activation="gelu"), remat=remat)
    forward, backward = stage.with_remat.forward, stage.with_remat.backward
    assert forward.fetches == stage.trace.forward.outputs
    # The backward starts from the stage's input, not from anything the forward made.
    assert set(stage.trace.given.inputs) < set(backward.feeds)
    assert not set(forward.fetches) & set(backward.feeds)


def test_a_saving_forward_keeps_what_spares_the_backward_every_matrix_product():
    _, stage = traced(dense(activation="gelu"))
    forward, backward = stage.without_remat.forward, stage.without_remat.backward
    assert len(forward.fetches) > len(stage.trace.forward.outputs)
    assert products(forward) == 3
    assert products(backward) == 6
    assert products(stage.with_remat.backward) == 9  # The three forwards again.


def test_accumulation_holds_one_buffer_a_weight():
    """A step's graph has one `Empty` a weight and no sum over microbatches."""
    layers = [keras.layers.Dense(4) for _ in range(4)]
    layer = tfgpipe.PipelinedLayer(layers, num_stages=2, num_microbatches=6)
    model = keras.Sequential([keras.Input((4,)), layer])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    graph = step.get_concrete_function(tf.TensorSpec([12, 4])).graph
    types = [op.type for op in graph.get_operations()]
    assert types.count("Empty") == 8
    assert "AddN" not in types


def test_an_eager_gradient_frees_each_microbatch_that_it_has_used(monkeypatch):
    made_by = collections.defaultdict(list)
    alive = collections.defaultdict(list)
    run = StageRun.run

    def num_alive(k):
        return sum(made() is not None for made in made_by[k])

    def recorded(self, action, feeds):
        if action.kind.is_backward:
            alive[action.stage].append(num_alive(action.stage))
            return run(self, action, feeds)
        made, sums = run(self, action, feeds)
        # Outputs of the model are joined, and the tape holds the join.
        names = made.keys() - (self.trace.forward.outputs if action.stage else ())
        made_by[action.stage] += (weakref.ref(made[name]) for name in names)
        return made, sums

    monkeypatch.setattr(StageRun, "run", recorded)
    layers = [keras.layers.Dense(8, activation="gelu") for _ in range(4)]
    model = tfgpipe.PipelinedLayer(
        layers, num_stages=2, num_microbatches=4, remat="none"
    )
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean(model(tf.ones((8, 8)), training=True) ** 2)
    assert tape.gradient(loss, model.trainable_variables)[0] is not None
    for k, counts in alive.items():
        each = len(made_by[k]) // 4
        assert each > 2
        assert counts == [4 * each, 3 * each, 2 * each, each]
        assert num_alive(k) == 0  # Though the tape is there.
