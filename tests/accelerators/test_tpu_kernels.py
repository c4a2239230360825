"""The table of kernels for TPUs, and what a step needs of it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import tfgpipe
from tfgpipe._compat import kernels
from tfgpipe.accelerators import tpu_kernels

# The step counts, and means over batches: single numbers, which the host computes.
SCALARS = {"AddV2", "BroadcastTo", "Cast", "DivNoNan", "Mul", "Sum"}


def _node(op: str, **types: tf.DType) -> tf.compat.v1.NodeDef:
    node = tf.compat.v1.NodeDef(name="node", op=op)
    for name, dtype in types.items():
        node.attr[name].type = dtype.as_datatype_enum
    return node


@pytest.mark.parametrize(
    ("node", "device"),
    [
        (_node("Identity", T=tf.bfloat16), "TPU"),
        (_node("Identity", T=tf.string), "DEFAULT"),
        (_node("ReadVariableOp", dtype=tf.float32), "TPU"),
        (_node("AddV2", T=tf.int32), "DEFAULT"),
        (_node("AddV2", T=tf.float32), None),
        (_node("MatMul", T=tf.float32), None),
    ],
)
def test_tpus_have_few_kernels(node: tf.compat.v1.NodeDef, device: str | None) -> None:
    found = kernels.kernel_for(node, "TPU", tpu_kernels.table())
    assert (found and found.device) == device


def test_the_table_is_that_of_the_package_for_tpus() -> None:
    try:
        version = importlib.metadata.version("tensorflow-tpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("The table is compared where tensorflow-tpu is installed.")
    assert version == "2.20.0"
    committed = Path(tpu_kernels.__file__).with_suffix(".txt").read_text("utf-8")
    assert list(tpu_kernels.lines()) == committed.splitlines()
    for op in kernels.operations_with_kernels():
        there = {
            (each.device, name, dtype)
            for each in kernels.registered_kernels(op)
            if each.device in ("TPU", "DEFAULT")
            for name, types in each.types.items()
            for dtype in types
        }
        assert there == {
            (each.device, name, dtype)
            for each in tpu_kernels.table().get(op, ())
            for name, types in each.types.items()
            for dtype in types
        }


@pytest.mark.parametrize("remat", ["stage", "none"])
def test_between_functions_only_single_numbers_have_no_kernel(remat: str) -> None:
    """Batches, activations, gradients, statistics, weights and slots are compiled."""
    inputs = x = keras.Input((6,))
    for _ in range(4):
        h = keras.layers.Dense(6, kernel_regularizer="l2", activation="gelu")(x)
        h = keras.layers.BatchNormalization()(h)
        x = keras.layers.Add()([keras.layers.Dropout(0.1)(h), x, inputs])
    model = tfgpipe.pipeline(
        keras.Model(inputs, x),
        num_stages=2,
        num_microbatches=4,
        schedule="zero_bubble",
        remat=remat,
        batch_norm="deferred",
        transfer_dtype="int8",
    )
    model.compile(keras.optimizers.AdamW(), "mse", metrics=["mae"])
    spec = tf.TensorSpec([16, 6])
    report = tfgpipe.dry_run(
        model, batch=(spec, spec), platform="tpu-v5e", compiles=False
    )
    missing = {each.op for each in report.on_host}
    assert missing <= SCALARS
    assert "Operations without a kernel, compiled on demand or run" in str(report)
    assert sum(report.on_host.values()) < 60
