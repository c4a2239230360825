"""What a machine without TensorFlow can run: the functions of a step, for JAX.

    python -m tests.accelerator_check --export=DIR

writes into DIR, for `run_exported.py`, a copy of which it has as well:

    manifest.json     functions with their arguments, data sheets of devices, versions
    NUMBER.mlir.gz    a function as StableHLO
    NUMBER.npz        what XLA gave for it on this machine's CPU: 4,096 entries of each
                      result, its largest entry and the root of its mean square

Arguments are not stored: `run_exported.arguments_of` draws them again.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from benchmarks.workloads import EncoderBlock
from tests.accelerator_check import identity, models, run_exported
from tests.accelerator_check.devices import Machine
from tests.accelerator_check.difference import TOLERANCES
from tests.accelerator_check.run_exported import Array, Function
from tfgpipe._compat import functions
from tfgpipe.accelerators import PLATFORMS, step_functions
from tfgpipe.planner import Device

# Of arguments. A product of 768 such entries is of the order of 1.
_SCALE = 0.05
# Stacks of `identity`, with what splits a backward pass, or does not.
_SMALL = (
    ("CNN with batch normalization", "1f1b"),
    ("causal transformer", "zero_bubble"),
    ("quantized MLP", "zero_bubble"),
)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A function, and what it is called with.

    Attributes:
        name: Its name.
        function: The computation, of tensors from tensors.
        specs: Shapes and types of its arguments.
        calls: Number of its calls in a step.
    """

    name: str
    function: Callable[..., Any]
    specs: Sequence[tf.TensorSpec]
    calls: int = 1


def export(folder: Path, *, quick: bool) -> None:
    """Writes the functions of some models.

    Args:
        folder: A new folder, or that of an earlier export, which is replaced.
        quick: True for small models.
    """
    tf.config.experimental.enable_tensor_float_32_execution(False)
    tfgpipe.make_logical_cpus(4)
    devices = [f"CPU:{i}" for i in range(4)]
    machine = Machine(kind="CPU", devices=devices, num_physical=1, quick=quick)
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if there and "manifest.json" not in there:
        sys.exit(f"Expected a new folder, or one of an export; received {folder}.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    written: list[Function] = []
    left_out: list[str] = []
    for model, dtype, found in _models(machine):
        for traced in found:
            what = f"{model}: {traced.name}"
            print(what, flush=True)
            file = f"{len(written):03}"
            try:
                written.append(_write(folder, file, traced, model, TOLERANCES[dtype]))
            except ValueError as error:
                left_out.append(f"{what}: {str(error).splitlines()[0]}")
                print(f"    left out: {left_out[-1]}")
    manifest = {
        "tensorflow": tf.__version__,
        "tfgpipe": tfgpipe.__version__,
        "tolerances": TOLERANCES,
        "devices": {name: _sheet(each.device) for name, each in PLATFORMS.items()},
        "functions": [each.to_json() for each in written],
        "left_out": left_out,
    }
    text = json.dumps(manifest, indent=1)
    (folder / "manifest.json").write_text(text, "utf-8")
    shutil.copy(run_exported.__file__, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{len(written)} functions, {size / 2**20:.1f} MiB in {folder}")


def _models(machine: Machine) -> Iterator[tuple[str, str, Iterator[_Traced]]]:
    """Yields models by name, each with its dtype policy and functions."""
    for dtype in ("float32", "mixed_bfloat16"):
        model, batch = models.language_model(machine, dtype=dtype, jit_compile=True)
        yield f"lm, {dtype}", dtype, _functions_of(model, batch)
    for stack, schedule in _SMALL:
        model, batch = _small(machine, stack, schedule)
        yield (
            f"{stack}, {schedule}",
            "float32",
            _functions_of(model, batch),
        )
    yield "SPMD blocks", "float32", iter([_spmd_step(machine)])


def _small(
    machine: Machine, name: str, schedule: str
) -> tuple[keras.Model, tuple[Any, Any]]:
    """Returns a pipeline of a small model, compiled, and a batch."""
    stack = identity.STACKS[name]
    keras.utils.set_random_seed(0)
    model: Any = tfgpipe.pipeline(
        stack.model(stack.make(keras.layers.Dense)),
        num_stages=len(machine.devices),
        num_microbatches=identity.M,
        schedule=schedule,
        remat="none",
        jit_compile=True,
        devices=machine.devices,
    )
    model.compile(keras.optimizers.Adam(), **stack.compiled())
    x = stack.inputs(identity.ROWS)
    return model, (x, stack.targets(identity.ROWS, model(x).shape[1:]))


def _functions_of(model: keras.Model, batch: Any) -> Iterator[_Traced]:
    """Yields the stage functions and updates of a model's step."""
    for each in step_functions(model, batch, platform="GPU"):
        name = f"{each.name} of device {each.device}"
        yield _Traced(name, each.function, each.specs, each.calls)


def _spmd_step(machine: Machine) -> _Traced:
    """Returns outputs and gradients of an SPMD pipeline, all stages on one device."""
    rows, length, width = models.block_shape(machine)
    layer: Any = tfgpipe.SPMDPipeline(
        [EncoderBlock() for _ in machine.devices],
        num_stages=len(machine.devices),
        num_microbatches=models.M,
    )
    layer.build((rows, length, width))
    weights = layer.trainable_variables

    def step(x: tf.Tensor, *values: tf.Tensor) -> Any:
        for weight, value in zip(weights, values, strict=True):
            weight.assign(value)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return y, tape.gradient(y, [x, *(weight.value for weight in weights)])

    shapes = [(rows, length, width), *(w.shape for w in weights)]
    specs = [tf.TensorSpec(shape) for shape in shapes]
    return _Traced("outputs and gradients", step, specs)


def _write(
    folder: Path, file: str, traced: _Traced, model: str, tolerance: float
) -> Function:
    """Writes a function and its results; returns its entry.

    Raises:
        ValueError: If XLA cannot compile it by shapes and types alone.
    """
    for spec in traced.specs:
        if not spec.shape.is_fully_defined():
            raise ValueError(f"an argument's shape is {spec.shape}")

    def call(*tensors: tf.Tensor) -> list[tf.Tensor]:
        results = tf.nest.flatten(traced.function(*tensors))
        return [tf.convert_to_tensor(x) for x in results if x is not None]

    compiled = tf.function(call, autograph=False, jit_compile=True)
    # Variables are arguments behind the others. What they hold is assigned before.
    held = functions.captures(compiled.get_concrete_function(*traced.specs).graph)
    variables = [x for x in held.values() if x.dtype == tf.resource]
    specs = [*traced.specs, *map(_spec_of_variable, variables)]
    given = tuple(Array(tuple(x.shape), x.dtype.name) for x in specs)
    entry = Function(traced.name, model, file, given, tolerance, traced.calls, _SCALE)
    drawn = run_exported.arguments_of(entry)[: len(traced.specs)]
    arguments = [tf.constant(x) for x in drawn]
    text = compiled.experimental_get_compiler_ir(*arguments)(stage="stablehlo")
    # Without the memory that arguments give to results: they are called again.
    text = re.sub(r"attributes \{mhlo.*\} \{\n", "{\n", text, count=1)
    (folder / f"{file}.mlir.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    results = [x.numpy() for x in compiled(*arguments)]
    if not all(np.all(np.isfinite(x.astype(float))) for x in results):
        raise ArithmeticError(f"{model}, {traced.name}: a result is not finite")
    arrays: dict[str, Any] = run_exported.sampled(results)
    np.savez_compressed(folder / f"{file}.npz", **arrays)
    return entry


def _spec_of_variable(handle: tf.Tensor) -> tf.TensorSpec:
    shape_and_type = handle._handle_data.shape_and_type[0]
    return tf.TensorSpec(shape_and_type.shape, tf.dtypes.as_dtype(shape_and_type.dtype))


def _sheet(device: Device) -> dict[str, float]:
    """Returns the numbers of a roofline."""
    return {
        "bandwidth": device.bandwidth,
        "bfloat16": device.peak("bfloat16"),
        "tf32": device.peak("float32"),
    }
