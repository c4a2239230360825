"""The process of a compiler: answers each HLO module with what the executable is.

`compilers.Compiler` starts it, by its file, and speaks to it over a socket. A request
is a JSON object and the module, an answer a JSON object. It loads JAX and nothing of
TensorFlow, of which a second copy of XLA in one process would be.

    python compile_process.py FILE_DESCRIPTOR
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
)
_COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(")
# Nobody is to be asked what is in this machine.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def main(file_descriptor: int) -> None:
    """Answers requests until the other end is closed.

    Args:
        file_descriptor: Of the socket.
    """
    os.environ.update(_ENVIRONMENT)
    import jax  # noqa: F401  Takes a second: before the first answer.

    with Connection(file_descriptor) as connection:
        connection.send_bytes(b"{}")
        while True:
            try:
                request = json.loads(connection.recv_bytes())
                module = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(json.dumps(_answer(request, module)).encode())


def _answer(request: dict[str, Any], module: bytes) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        answer = _compile(module, **request)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        answer = {"error": lines[0].strip() if lines else type(error).__name__}
    return {"seconds": time.perf_counter() - started, **answer}


def _compile(
    hlo: bytes, topology: dict[str, str], num_partitions: int
) -> dict[str, Any]:
    import numpy as np
    from jax.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib._jax.mlir import hlo_to_stablehlo
    from jaxlib.mlir import ir

    described = _devices(json.dumps(topology))
    devices = tuple(described[:num_partitions])
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, num_partitions
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.array([[device.id for device in devices]])
    )
    build = options.executable_build_options
    build.num_partitions = num_partitions
    build.use_spmd_partitioning = num_partitions > 1
    started = time.perf_counter()
    with mlir.make_ir_context():
        executable = devices[0].client.compile(
            ir.Module.parse(hlo_to_stablehlo(hlo)),
            xla_client.DeviceList(devices),
            options,
        )
    seconds = time.perf_counter() - started
    (optimized,) = executable.hlo_modules()
    memory = executable.get_compiled_memory_stats()
    # The compiler for NVIDIA's GPUs counts no code.
    code = memory.generated_code_size_in_bytes or len(executable.serialize())
    costs = _costs(executable, optimized)
    found = _COLLECTIVE.findall(optimized.to_string())
    return {
        "seconds": seconds,
        "code_bytes": code,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "flops": costs.get("flops", 0.0),
        "bytes_accessed": costs.get("bytes accessed", 0.0),
        "collectives": {name: found.count(name) for name in COLLECTIVES},
    }


@functools.cache
def _devices(topology: str) -> Any:
    """Returns the devices of a topology, which is JSON."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(**json.loads(topology)).devices


def _costs(executable: Any, optimized: Any) -> dict[str, float]:
    """Returns what the optimized module costs, by its compiler or by plain XLA."""
    from jaxlib import xla_client
    from jaxlib._jax import JaxRuntimeError, hlo_module_cost_analysis

    try:
        return executable.cost_analysis()
    except JaxRuntimeError:  # The compiler for NVIDIA's has none.
        return hlo_module_cost_analysis(xla_client.make_cpu_client(), optimized)


if __name__ == "__main__":
    main(int(sys.argv[1]))
