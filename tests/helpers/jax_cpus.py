"""Runs a partitioned HLO module on several CPU devices of JAX, in its own process.

    python jax_cpus.py NUM_PARTITIONS MODULE ARGUMENTS RESULTS

TensorFlow partitions computations on TPUs alone; JAX' CPU client does so with the same
partitioner of XLA. ARGUMENTS and RESULTS are `.npz` files of whole arrays.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def main(num_partitions: int, module: str, arguments: str, results: str) -> None:
    """Compiles and runs the module, and checks that parts of replicas are equal."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import jax
    from jax.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib._jax.mlir import hlo_to_stablehlo
    from jaxlib.mlir import ir

    jax.config.update("jax_enable_x64", True)
    devices = jax.devices()[:num_partitions]
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, num_partitions
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.arange(num_partitions)[np.newaxis]
    )
    options.executable_build_options.num_partitions = num_partitions
    options.executable_build_options.use_spmd_partitioning = True
    with mlir.make_ir_context():
        executable = devices[0].client.compile_and_load(
            ir.Module.parse(hlo_to_stablehlo(Path(module).read_bytes())),
            xla_client.DeviceList(tuple(devices)),
            options,
        )
    text = executable.hlo_modules()[0].to_string()
    with np.load(arguments) as given:
        arrays = [given[f"{i}"] for i in range(len(given.files))]
    mesh = jax.sharding.Mesh(np.array(devices), ["core"])
    placed = [
        jax.device_put(
            array,
            jax.NamedSharding(mesh, jax.P("core") if _is_split(sharding) else jax.P()),
        )
        for array, sharding in zip(
            arrays, executable.get_parameter_shardings(), strict=True
        )
    ]
    received = executable.execute_sharded(placed)
    parts = received.consume_with_handlers(
        [list] * len(executable.get_output_shardings())
    )
    made = [
        _whole([np.asarray(part) for part in each], sharding)
        for each, sharding in zip(parts, executable.get_output_shardings(), strict=True)
    ]
    np.savez(
        results,
        *made,
        parts=np.array([each[0].nbytes for each in parts]),
        permutes=text.count(" collective-permute(")
        + text.count(" collective-permute-start("),
    )


def _whole(parts: list[np.ndarray], sharding: Any) -> np.ndarray:
    if _is_split(sharding):
        return np.concatenate(parts)
    for part in parts[1:]:
        np.testing.assert_array_equal(part, parts[0])
    return parts[0]


def _is_split(sharding: Any) -> bool:
    return math.prod(sharding.tile_assignment_dimensions) > 1


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
