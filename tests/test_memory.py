"""What is kept between the forward and the backward."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

from benchmarks.worker import Side, Worker
from tfgpipe import recording
from tfgpipe.replay import Wire
from tfgpipe.stage import Library, Mode, Stage

# Runs one training step in a process of its own, and prints by how much its resident
# memory grew at its highest.
CHILD = """
import json, re, sys
import tfgpipe
tfgpipe.make_logical_cpus(2)
import keras, tensorflow as tf
def peak():
    # Not `ru_maxrss`, which a process inherits from the one that started it.
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1])
layers = [keras.layers.Dense(256, activation="gelu") for _ in range(16)]
layer = tfgpipe.PipelinedLayer(
    layers, num_stages=2, num_microbatches=8, remat=sys.argv[1]
)
model = keras.Sequential([keras.Input((256,)), layer])
x = tf.ones((8192, 256))
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x, training=True))
    return [tf.norm(g) for g in tape.gradient(loss, model.trainable_variables)]
step(x[:8])
before = peak()
step(x)
print(json.dumps(peak() - before))
"""


SIDE = Side(workload="mlp", num_stages=2, num_microbatches=4, schedule="gpipe")


def peak_growth(remat: str) -> int:
    root = pathlib.Path(__file__).parent.parent
    child = subprocess.run(
        [sys.executable, "-c", CHILD, remat],
        # oneDNN's pool grows in steps of its own, and keeps what is freed.
        env={
            **os.environ,
            "PYTHONPATH": str(root),
            "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.mark.slow
def test_rematerialisation_at_least_halves_peak_memory():
    kept = peak_growth("none")
    # 16 layers x (input, pre-activation) x 8192 x 256 floats.
    assert kept > 16 * 2 * 8192 * 256 * 4
    for remat in ("stage", "layer"):
        assert peak_growth(remat) < kept / 2, remat


@pytest.mark.slow
@pytest.mark.parametrize("onednn", ["0", "1"])
def test_measured_memory_is_that_of_the_formula_with_onednn_or_without(
    monkeypatch, onednn
):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", onednn)
    with Worker(SIDE, for_memory=True) as worker:
        memory, expected = worker.memory(), worker.expected_memory()
    assert (memory.peak - memory.before) / expected == pytest.approx(1, abs=0.25)


def test_a_measurement_that_cannot_be_true_is_refused(monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    monkeypatch.delenv("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", raising=False)
    with Worker(SIDE) as worker:
        words = "does not tell what a step takes.*TF_ONEDNN_USE_SYSTEM_ALLOCATOR=1"
        with pytest.raises(RuntimeError, match=words):
            worker.memory()


def make_stage() -> Stage:
    layers = [keras.layers.Dense(4, activation="gelu") for _ in range(3)]
    recorded = recording.from_layers(layers, keras.KerasTensor((2, 4)), {})
    return Stage(0, recorded.network.part(slice(0, 3)), Library())


def traced(*, per_layer: bool = False):
    mode = Mode(
        training=True, per_layer=per_layer, may_be_empty=False, jit_compile=False
    )
    return make_stage().traced({Wire(0): tf.TensorSpec([2, 4])}, mode)


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_recomputing_forward_hands_on_its_output_and_nothing_else(per_layer):
    stage = traced(per_layer=per_layer)
    forward, backward = stage.recomputing.forward, stage.recomputing.backward
    assert forward.fetches == stage.trace.outputs
    # The backward starts from the stage's input, not from anything the forward made.
    assert set(stage.trace.inputs) < set(backward.feeds)
    assert not set(forward.fetches) & set(backward.feeds)


def test_a_saving_forward_keeps_what_spares_the_backward_every_matrix_product():
    stage = traced()
    forward, backward = stage.saving.forward, stage.saving.backward
    assert len(forward.fetches) > len(stage.trace.outputs)

    def products(program) -> int:
        operations = program.function.graph.get_operations()
        return sum(op.type == "MatMul" for op in operations)

    assert products(forward) == 3
    assert products(backward) == 6
    assert products(stage.recomputing.backward) == 9  # The three forwards again.


def test_accumulation_holds_one_buffer_a_weight():
    """A step's graph has one `Empty` a weight and no sum over microbatches."""
    import tfgpipe

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
