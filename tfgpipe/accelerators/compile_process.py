"""The process of a compiler: answers each HLO module with what the executable is.

`compilers.Compiler` starts it, by its file, and speaks to it over a socket. A request
is a JSON object and the module, an answer a JSON object. It loads JAX and nothing of
TensorFlow, of which a second copy of XLA in one process would be.

    python compile_process.py FILE_DESCRIPTOR
"""

from __future__ import annotations

import collections
import functools
import json
import math
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
_CUSTOM_CALL = re.compile(
    r"= (.*?) custom-call\((.*?)\), (?:(.*?), )?custom_call_target=\"([^\"]*)\"(.*)"
)
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
# What moves nothing, and calls whose computations are counted by themselves.
_MOVES_NOTHING = re.compile(
    r"parameter|constant|bitcast|tuple|get-tuple-element|\S+-done|while|conditional|call"
)
_CALLED_FOR_EACH_ELEMENT = re.compile(r"(?:calls|to_apply)=(%[\w.-]+)")
_NO_TILES = "Couldn't find output tile sizes"
_SCALAR_PAD = re.compile(r" pad\((%[^ ,]+), %[^ ,]+\), padding=(?=,|$)", re.MULTILINE)
# Nobody is to be asked what is in this machine, or waited for.
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def main(file_descriptor: int) -> None:
    """Answers requests until the other end is closed.

    Args:
        file_descriptor: The descriptor of the socket.
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
    from jaxlib._jax import JaxRuntimeError
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
    stablehlo, remark = _stablehlo(hlo), None

    def compile_module() -> Any:
        with mlir.make_ir_context():
            return devices[0].client.compile(
                ir.Module.parse(stablehlo), xla_client.DeviceList(devices), options
            )

    started = time.perf_counter()
    try:
        executable = compile_module()
    except JaxRuntimeError as error:
        if _NO_TILES not in str(error):
            raise
        # With a device XLA would try kernels, of Triton's and of cuBLAS, and take one.
        options.env_option_overrides = [("xla_gpu_enable_triton_gemm", False)]
        executable = compile_module()
        remark = "All products by cuBLAS: XLA found no tiles for one with Triton."
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
        "remark": remark,
    }


def _stablehlo(hlo: bytes) -> bytes:
    """Returns a module as StableHLO, which has no copy of a value.

    TensorFlow copies what it assigns to variables. Reshaping to the same shape is as
    good, and XLA removes it.
    """
    from jaxlib import xla_client
    from jaxlib._jax.mlir import hlo_to_stablehlo

    module = xla_client.XlaComputation(hlo).get_hlo_module()
    if " copy(" not in module.to_string():
        return hlo_to_stablehlo(hlo)
    options = xla_client.hlo.HloPrintOptions()
    options.print_large_constants = True
    text = module.to_string(options).replace(" copy(", " reshape(")
    # XLA writes the padding of a scalar, which is none, as it does not read it.
    text = _SCALAR_PAD.sub(r" reshape(\1)", text)
    module = xla_client.hlo.hlo_module_from_text(text)
    return hlo_to_stablehlo(module.as_serialized_hlo_module_proto())


@functools.cache
def _devices(topology: str) -> Any:
    """Returns the devices of a topology, which is JSON."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(**json.loads(topology)).devices


def _costs(executable: Any, optimized: Any) -> dict[str, float]:
    """Returns the costs of the optimized module, by its compiler or by plain XLA.

    The compiler for NVIDIA's GPUs counts nothing, and plain XLA nothing of a call of
    cuDNN or cuBLAS but -1 operations. The one of TPUs counts what is in the memory on
    the chip as well, which is not what limits a kernel.
    """
    from jaxlib import xla_client
    from jaxlib._jax import JaxRuntimeError, hlo_module_cost_analysis

    options = xla_client.hlo.HloPrintOptions()
    options.print_operand_shape = True
    text = optimized.to_string(options)
    try:
        costs = executable.cost_analysis()
    except JaxRuntimeError:
        costs = hlo_module_cost_analysis(xla_client.make_cpu_client(), optimized)
    else:
        least = min(costs.get("bytes accessed", 0.0), memory_bytes(text))
        return {**costs, "bytes accessed": least}
    calls = _CUSTOM_CALL.findall(text)
    flops = costs.get("flops", 0.0) + sum(1 + library_flops(*call) for call in calls)
    moved = costs.get("bytes accessed", 0.0) + sum(
        library_bytes(result, operands) for result, operands, *_ in calls
    )
    return {**costs, "flops": max(flops, 0.0), "bytes accessed": moved}


def memory_bytes(module: str) -> float:
    """Returns the bytes that a module's kernels read and write in the device's memory.

    What is in another memory space, as `S(1)` of a layout says, does not count, and a
    loop counts once.

    Args:
        module: An optimized module as text, with the shapes of operands.
    """
    inner = set(_CALLED_FOR_EACH_ELEMENT.findall(module))
    total, counts = 0.0, False
    for line in module.splitlines():
        if not line.startswith(" "):
            name = line.removeprefix("ENTRY ").partition(" ")[0]
            counts = line.endswith("{") and name not in inner
            continue
        found = re.match(r"\s+(?:ROOT )?\S+ = (.+?) ([a-z][\w-]*)\((.*)", line)
        if not counts or found is None or _MOVES_NOTHING.fullmatch(found[2]):
            continue
        read = collections.Counter(_in_memory(_arguments(found[3])))
        made = collections.Counter(_in_memory(found[1]))
        if found[2].endswith("-start"):  # Whose result has its operands in it.
            made -= read
        total += sum(_shape_bytes(*shape) for shape in (read + made).elements())
    return total


def library_bytes(result: str, operands: str) -> float:
    """Returns the bytes that a call of cuDNN or cuBLAS reads and writes, no workspace.

    >>> library_bytes("(f32[8,4]{1,0}, s8[4194304]{0})", "f32[8,2]{1,0} %x")
    192

    Args:
        result: The shape of what it makes, or shapes.
        operands: The shapes of what it takes.
    """
    shapes = [x for x in _SHAPE.findall(f"{result} {operands}") if x[0] != "s8"]
    return sum(_shape_bytes(dtype, sizes) for dtype, sizes, _ in shapes)


def _in_memory(shapes: str) -> list[tuple[str, str]]:
    """Returns types and sizes of those that are in the device's memory."""
    return [
        (dtype, sizes)
        for dtype, sizes, layout in _SHAPE.findall(shapes)
        if "S(" not in layout
    ]


def _arguments(text: str) -> str:
    """Returns the text in front of the bracket that closes the operands."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[:i]
    return text


def _shape_bytes(dtype: str, sizes: str) -> int:
    bits = re.search(r"\d+", dtype)
    return math.prod(_sizes(sizes)) * (int(bits[0]) if bits else 8) // 8


def library_flops(
    result: str, operands: str, attributes: str, target: str, config: str
) -> float:
    """Returns the operations of a call of cuDNN or cuBLAS, 0 if it is another.

    >>> library_flops("f32[8,4]", "f32[8,2] %x, f32[2,4] %y", "", "__cublas$gemm",
    ...               '"lhs_contracting_dimensions":["1"]')
    128.0

    Args:
        result: The shape of what it makes, or shapes.
        operands: The shapes of what it takes, in order.
        attributes: The text between its operands and its name.
        target: Its name.
        config: The text after its name.
    """
    made = [_sizes(shape) for _, shape, _ in _SHAPE.findall(result)]
    given = [_sizes(shape) for _, shape, _ in _SHAPE.findall(operands)]
    if target.startswith("__cublas$"):
        found = re.search(r'"lhs_contracting_dimensions":\[([^]]*)\]', config)
        dimensions = re.findall(r"\d+", found[1]) if found else []
        summed = math.prod(given[0][int(dimension)] for dimension in dimensions)
        return 2.0 * math.prod(made[0]) * summed
    labels = re.search(r"dim_labels=\w+_(\w+)->", attributes)
    if not target.startswith("__cudnn$conv") or labels is None:
        return 0.0
    if "BackwardInput" in target:
        outputs, kernel = given[0], given[1]
    elif "BackwardFilter" in target:
        outputs, kernel = given[1], made[0]
    else:
        outputs, kernel = made[0], given[1]
    features = kernel[labels[1].index("o")]
    return 2.0 * math.prod(outputs) * math.prod(kernel) / features


def _sizes(shape: str) -> list[int]:
    return [int(size) for size in shape.split(",") if size]


if __name__ == "__main__":
    main(int(sys.argv[1]))
