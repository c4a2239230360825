"""The train step of an SPMD pipeline, partitioned by XLA."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import jax_cpus
from tests.helpers.subprocesses import python
from tests.helpers.transformer_blocks import Block, data, pair, pipeline_of, values
from tfgpipe import spmd
from tfgpipe._compat import spmd as annotations

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None,
    reason="needs JAX, whose CPU client partitions: pip install tfgpipe[compilers]",
)


def _adamw() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(0.01, epsilon=1e-3)


def _gradients() -> keras.optimizers.Optimizer:
    """Returns an optimizer whose updates are the gradients."""
    return keras.optimizers.SGD(1.0)


def _pair(
    num_stages: int,
    *,
    attends: bool = False,
    optimizer: Callable[[], keras.optimizers.Optimizer] = _adamw,
) -> tuple[keras.Model, keras.Model]:
    return pair(
        lambda: Block(attends=attends),
        num_layers=2 * num_stages,
        num_stages=num_stages,
        num_microbatches=4,
        partitioned=True,
        optimizer=optimizer,
    )


def test_weights_and_slots_are_split_and_nothing_else() -> None:
    _, pipelined = _pair(2)
    x, y = data(8)
    step = spmd.train_step_module(pipelined, tf.constant(x), tf.constant(y))
    split = {id(step.variables[i]) for i in step.split}
    stacked = pipeline_of(pipelined).variables
    slots = [v for v in pipelined.optimizer.variables if "spmd_pipeline" in v.path]
    trained = pipeline_of(pipelined).trainable_variables
    assert len(slots) == 2 * len(trained)
    # Seeds are read as they are traced, and changed in no step without dropout.
    assert split <= {id(v.value) for v in (*stacked, *slots)}
    assert split >= {id(v.value) for v in (*trained, *slots)}
    parameters = annotations.argument_shardings(step.hlo)
    for i, sharding in enumerate(parameters):
        assert bool(sharding) == (i in step.split), i
    # Each of them is updated where it is.
    assert set(step.split) <= set(step.updates.values())


def test_a_model_that_is_not_partitioned_has_no_such_step() -> None:
    _, pipelined = pair(Block, num_layers=2, num_stages=2, num_microbatches=1)
    with pytest.raises(ValueError, match="partitioned=True"):
        spmd.train_step_module(pipelined, *map(tf.constant, data(2)))


@needs_jax
@pytest.mark.parametrize(
    ("num_stages", "rows", "attends", "optimizer"),
    [(2, 12, False, _gradients), (4, 8, True, _adamw)],
)
def test_on_several_devices_the_step_is_that_of_the_plain_model(
    floatx: Callable[[str], None],
    tmp_path: Path,
    num_stages: int,
    rows: int,
    attends: bool,
    optimizer: Callable[[], keras.optimizers.Optimizer],
) -> None:
    floatx("float64")
    plain, pipelined = _pair(num_stages, attends=attends, optimizer=optimizer)
    x, y = data(rows)
    step = spmd.train_step_module(pipelined, tf.constant(x), tf.constant(y))
    results = _run(step, tmp_path)
    before = values(plain)
    expected = plain.train_on_batch(x, y, return_dict=True)
    logs = [results[f"arr_{i}"] for i in range(2)]
    # The logs in the order of their names.
    np.testing.assert_allclose(
        logs, [expected["accuracy"], expected["loss"]], rtol=1e-12
    )
    for i, argument in step.updates.items():
        variable = step.variables[argument]
        assert variable is not None
        array = results[f"arr_{i}"]
        parts = num_stages if argument in step.split else 1
        assert results["parts"][i] == array.nbytes // parts
        variable.assign(array)
    after = values(pipelined)
    changes = [np.abs(a - b).max() for a, b in zip(values(plain), before, strict=True)]
    assert sum(change > 1e-4 for change in changes) > len(changes) / 2
    for a, b in zip(after, values(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
    # Forward, forward again, backward.
    assert results["permutes"] >= 3


def test_the_loops_alone_are_a_module_too() -> None:
    layers = [keras.layers.Dense(4) for _ in range(2)]
    layer = tfgpipe.SPMDPipeline(
        layers, num_stages=2, num_microbatches=2, partitioned=True
    )
    layer.build((4, 4))
    module = spmd.gradient_module(layer, tf.ones([4, 4]))
    assert annotations.argument_shardings(module.hlo)[:3] == [[], [2, 1, 1], [2, 1]]
    assert len(module.split) == 2


def _run(step: Any, folder: Path) -> Any:
    module, arguments, results = (folder / f"{n}.npz" for n in ("hlo", "in", "out"))
    module.write_bytes(step.hlo)
    arrays = {str(i): np.asarray(x) for i, x in enumerate(step.arguments)}
    np.savez(arguments, **arrays)  # type: ignore[arg-type]
    run = python(
        jax_cpus.__file__, *map(str, (step.num_partitions, module, arguments, results))
    )
    assert run.returncode == 0, re.sub(r"(?s).*Traceback", "", run.stderr)[-3000:]
    return np.load(results)
