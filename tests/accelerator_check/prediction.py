"""What a dry run, the planner and a compiler predict of a step."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfgpipe
from tests.accelerator_check import models
from tests.accelerator_check.devices import Machine
from tests.accelerator_check.models import M
from tests.accelerator_check.report import NotRunError, Recorder
from tfgpipe.accelerators import Compiler, find, missing
from tfgpipe_params.lm.transformer import Block

_MIB = 2**20
_FILE = "prediction.json"


def prediction_part(recorder: Recorder, machine: Machine, folder: Path) -> None:
    """Predicts memory, time and copies of a step, in a process without GPUs."""
    models.need(machine, 2)
    devices = [f"CPU:{i}" for i in range(len(machine.devices))]
    tfgpipe.make_logical_cpus(len(devices))
    platform = machine.platform or "a100-40g"
    if machine.platform is None:
        what = machine.name or machine.kind
        recorder.text(f"No platform is known for {what}; predicted is {platform}.")
    made: dict[str, dict[str, Any]] = {}
    for dtype in models.dtypes(machine):
        if made and recorder.seconds_left < 60:
            recorder.left_out(f"a dry run in {dtype}: time")
            break
        model, batch = models.language_model(
            machine, dtype=dtype, devices=devices, jit_compile=False
        )
        run = tfgpipe.dry_run(model, batch=batch, platform=platform)
        copies = collections.Counter[str]()
        for each in run.transfers:
            ends = each.source, each.target
            is_result = each.what.endswith("PartitionedCall")
            if is_result and each.reader.startswith("stage_"):
                copies[f"{ends[0]} to {ends[1]}"] += each.count if min(ends) >= 0 else 0
        on_host = collections.Counter[str]()
        for operation, count in run.on_host.items():
            if "float" in " ".join(operation.dtypes):
                on_host[operation.op] += count
        second = run.estimate.memory[1]
        made[dtype] = {
            "platform": platform,
            "bytes": [held.total - held.reserved for held in run.estimate.memory],
            # Of a stage of blocks alone, if there are more than two.
            "function_bytes": second.workspace + second.recomputed,
            "seconds": run.estimate.time.total,
            "copies": +copies,
            "on_host": on_host,
        }
        recorder.text(f"{dtype}: see `parts/prediction-{dtype}.txt`")
        (folder / f"prediction-{dtype}.txt").write_text(f"{run}\n", "utf-8")
        (folder / _FILE).write_text(json.dumps(made, indent=1), "utf-8")
    if packages := missing(find(platform)):
        recorder.left_out(f"the compiler: not installed are {', '.join(packages)}")
        return
    with Compiler(platform, timeout_seconds=60) as compiler:
        for dtype, predicted in made.items():
            if recorder.seconds_left < 60:
                recorder.left_out(f"the compiler in {dtype}: time")
                continue
            compiled = compiler.compile(_gradients_of_a_stage(machine, dtype))
            if compiled.error is not None:
                recorder.failed(f"The compiler says for {dtype}: {compiled.error}")
                continue
            recorder.row(
                "Forward and backward of the second stage, one microbatch",
                dtype=dtype,
                platform=platform,
                **{
                    "planner MiB": predicted["function_bytes"] / _MIB,
                    "compiler MiB": compiled.temp_bytes / _MIB,
                    "compiled in s": compiled.seconds,
                },
            )


def _gradients_of_a_stage(machine: Machine, dtype: str) -> bytes:
    """Returns the HLO of what a stage of blocks computes for a microbatch."""
    sizes, batch_size = models.sizes_of(machine)
    keras.config.set_dtype_policy(dtype)
    try:
        blocks = [
            Block(
                width=sizes.width,
                num_heads=sizes.num_heads,
                mlp_width=sizes.mlp_width,
                dropout=sizes.dropout,
            )
            for _ in range(sizes.num_layers // len(machine.devices))
        ]
        inputs = keras.Input((sizes.context, sizes.width))
        model = keras.Sequential([inputs, *blocks])
    finally:
        keras.config.set_dtype_policy("float32")
    num_weights = len(model.trainable_variables)

    def gradients(x: tf.Tensor, *values: tf.Tensor) -> Any:
        weights, rest = values[:num_weights], values[num_weights:]
        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            y, _ = model.stateless_call(weights, rest, x, training=True)
        return tape.gradient(y, [x, *weights])

    variables = [*model.trainable_variables, *model.non_trainable_variables]
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    x = tf.TensorSpec([batch_size // M, sizes.context, sizes.width])
    lower = tf.function(gradients, jit_compile=True).experimental_get_compiler_ir
    module: bytes = lower(x, *specs)(stage="hlo_serialized", platform_name="GPU")
    return module


def read_prediction(folder: Path) -> dict[str, Any]:
    """Returns what was predicted, by type.

    Raises:
        NotRunError: If nothing was.
    """
    path = folder / _FILE
    if not path.exists():
        raise NotRunError("nothing is predicted: see that part")
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found
