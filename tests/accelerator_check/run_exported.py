"""Runs exported functions on the devices that JAX has, and compares their results.

    python run_exported.py DIR [--platform=gpu] [--repeats=20]

DIR is what `python -m tests.accelerator_check --export=DIR` has written: stage
functions, updates and an SPMD step as StableHLO, and what XLA gave for them on a CPU.
This needs JAX and NumPy alone, and no network. Each function runs on the first device;
its results are compared, its step timed, once with products as exported, in full
float32, and once as the device prefers them, in TF32 for example. Beside the time is
the planner's roofline: the longer of XLA's FLOPs at the peak and its bytes at the
bandwidth of the device's data sheet. Writes `DIR/report-DEVICE.md`; the exit status is
1 if a result differs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

NUM_SAMPLES = 4096


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument or a result.

    Attributes:
        shape: Its sizes.
        dtype: Its type, as NumPy or ml_dtypes name it.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Function:
    """One exported function.

    Attributes:
        name: Its name.
        model: Its model.
        file: The name of its files, without the ending.
        arguments: Shapes and types of its arguments.
        tolerance: Of a result's entry, and of the largest entry.
        calls: Number of its calls in a step.
        scale: Standard deviation of floating arguments.
    """

    name: str
    model: str
    file: str
    arguments: tuple[Array, ...]
    tolerance: float
    calls: int
    scale: float

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Function:
        """Returns the function of an entry of `manifest.json`."""
        given = [Array(tuple(shape), dtype) for shape, dtype in entry["arguments"]]
        return cls(**{**entry, "arguments": tuple(given)})

    def to_json(self) -> dict[str, Any]:
        """Returns the entry of `manifest.json`."""
        given = [[each.shape, each.dtype] for each in self.arguments]
        return {**dataclasses.asdict(self), "arguments": given}


def arguments_of(function: Function) -> list[np.ndarray]:
    """Returns the arguments of a function, the same on every machine.

    Floats are normal, of updates their absolute values; integers are below 8, single
    ones 0 or 1.
    """
    found = []
    for index, each in enumerate(function.arguments):
        rng = np.random.Generator(np.random.PCG64([index, int(function.file)]))
        if each.dtype == "bool":
            found.append(rng.random(each.shape) < 0.5)
        elif "int" in each.dtype:
            limit = 8 if each.shape else 2
            found.append(rng.integers(0, limit, each.shape).astype(each.dtype))
        else:
            drawn = function.scale * rng.standard_normal(each.shape, dtype=np.float32)
            if function.name.startswith("update"):  # Second moments are not negative.
                drawn = np.abs(drawn)
            found.append(drawn.astype(_dtype(each.dtype)))
    return found


def sampled(results: Sequence[Any]) -> dict[str, np.ndarray]:
    """Returns entries of results, and the root of their mean square, to be compared.

    Args:
        results: Arrays.
    """
    found = {}
    for index, result in enumerate(results):
        array = np.asarray(result)
        exact = array.dtype == bool or np.issubdtype(array.dtype, np.integer)
        flat = array.reshape(-1) if exact else array.reshape(-1).astype(np.float32)
        rng = np.random.Generator(np.random.PCG64(index))
        if flat.size > NUM_SAMPLES:
            found[f"{index}"] = flat[rng.integers(0, flat.size, NUM_SAMPLES)]
        else:
            found[f"{index}"] = flat
        if not exact and flat.size:
            wide = flat.astype(np.float64)
            largest = np.max(np.abs(wide))
            root = np.sqrt(np.mean(wide**2))
            found[f"{index} scale"] = np.array([largest, root])
    return found


def difference(
    expected: dict[str, np.ndarray], received: dict[str, np.ndarray], tolerance: float
) -> float:
    """Returns the largest difference, of what is tolerated: 1 is the most that passes.

    Args:
        expected: What `sampled` gave on the other machine.
        received: What it gives here.
        tolerance: Of an entry and of the largest entry of its array, or of a 1e-5th
            of the largest entry of all.
    """
    if expected.keys() != received.keys():
        return float("inf")
    scales = {k: float(x[0]) for k, x in expected.items() if k.endswith(" scale")}
    # What is nothing but rounding, as the gradient of a key's bias, is small beside it.
    least = max([1e-5 * x for x in scales.values()], default=0.0) or 1e-30
    worst = 0.0
    for name, a in expected.items():
        b = received[name]
        if a.shape != b.shape:
            return float("inf")
        if not np.issubdtype(a.dtype, np.floating):
            worst = max(worst, float("inf") if np.any(a != b) else 0.0)
        elif a.size:
            own = scales.get(name.removesuffix(" scale") + " scale", 0.0)
            limit = tolerance * (np.abs(a.astype(float)) + max(own, least))
            found = float(np.max(np.abs(a.astype(float) - b.astype(float)) / limit))
            worst = max(worst, found if np.isfinite(found) else float("inf"))
    return worst


def _dtype(name: str) -> Any:
    if name in ("bfloat16",):
        import ml_dtypes  # JAX brings it.

        return ml_dtypes.bfloat16
    return np.dtype(name)


class _Runner:
    """Compiles and runs modules on a device of JAX."""

    def __init__(self, platform: str | None, repeats: int) -> None:
        import jax

        jax.config.update("jax_enable_x64", True)
        self._jax = jax
        self._repeats = repeats
        self.device = jax.devices(platform)[0]

    def run(
        self, text: str, arguments: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Returns the results of a module, and what was measured."""
        started = time.perf_counter()
        executable = self._compile(text)
        measured = {"compiled in s": time.perf_counter() - started}
        placed = [self._jax.device_put(x, self.device) for x in arguments]

        def call() -> list[Any]:
            made = executable.execute_sharded(placed)
            results = made.disassemble_into_single_device_arrays()
            return [each[0] for each in results]

        results = call()
        self._jax.block_until_ready(results)
        seconds = []
        for _ in range(self._repeats):
            started = time.perf_counter()
            self._jax.block_until_ready(call())
            seconds.append(time.perf_counter() - started)
        measured["ms"] = 1e3 * statistics.median(seconds)
        # Of the device's plugin, which may not have them.
        with contextlib.suppress(Exception):
            costs = executable.cost_analysis()
            costs = costs[0] if isinstance(costs, list) else costs
            measured["flops"] = costs["flops"]
            measured["bytes"] = costs["bytes accessed"]
        with contextlib.suppress(Exception):
            memory = executable.get_compiled_memory_stats()
            measured["temporary MiB"] = memory.temp_size_in_bytes / 2**20
        return [np.asarray(each) for each in results], measured

    def _compile(self, text: str) -> Any:
        from jax.interpreters import mlir
        from jaxlib import xla_client
        from jaxlib.mlir import ir

        client = self.device.client
        options = xla_client.CompileOptions()
        options.num_replicas = options.num_partitions = 1
        options.device_assignment = xla_client.DeviceAssignment.create(
            np.array([[self.device.id]])
        )
        with mlir.make_ir_context():
            try:
                module = ir.Module.parse(text)
            except ir.MLIRError:
                module = ir.Module.parse(repacked(text))
            devices = xla_client.DeviceList((self.device,))
            return client.compile_and_load(module, devices, options)


def repacked(text: str) -> str:
    """Returns a module whose constants of truth values are written the other way.

    Some versions of MLIR write a byte for each, others a bit.
    """

    def other(found: re.Match[str]) -> str:
        entries = np.frombuffer(bytes.fromhex(found[1]), np.uint8)
        size = math.prod(int(x) for x in found[2].split("x")[:-1])
        if entries.size == size:
            entries = np.packbits(entries != 0, bitorder="little")
        else:
            entries = np.unpackbits(entries, bitorder="little")[:size]
        data = entries.tobytes().hex().upper()
        return f'dense<"0x{data}"> : tensor<{found[2]}>'

    return re.sub(r'dense<"0x([0-9A-F]+)"> : tensor<([0-9x]+xi1)>', other, text)


def check(folder: Path, platform: str | None, repeats: int) -> tuple[str, bool]:
    """Runs all functions of a folder; returns a report, and whether all agree."""
    import jax

    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    runner = _Runner(platform, repeats)
    peaks = _peaks(manifest["devices"], runner.device.device_kind)
    rows, failures = [], []
    functions = [Function.from_json(entry) for entry in manifest["functions"]]
    for number, function in enumerate(functions, 1):
        print(f"[{number}/{len(functions)}] {function.model}: {function.name}")
        row = {"model": function.model, "function": function.name}
        row |= {"calls": f"{function.calls}"}
        try:
            row |= _of_function(runner, folder, function, peaks)
        except Exception as error:  # What a compiler or a driver raises.
            first = (str(error).splitlines() or [""])[0]
            failures.append(
                f"{function.model}, {function.name}: {type(error).__name__}: {first}"
            )
            row["difference"] = "failed"
        else:
            if not float(row["difference"]) <= 1:
                failures.append(f"{function.model}, {function.name}: results differ")
        rows.append(row)
    kind = runner.device.device_kind
    text = [
        f"# Exported functions on {kind}",
        f"JAX {jax.__version__}, {runner.device.client.platform_version.strip()}. "
        f"{len(rows)} functions, {len(failures)} failed. Exported by TensorFlow "
        f"{manifest['tensorflow']}, tfgpipe {manifest['tfgpipe']}.",
        "`difference` is the largest, of what is tolerated: "
        + ", ".join(f"{t:g} for {name}" for name, t in manifest["tolerances"].items())
        + ". `ms` is the median of a call with products in full precision, `fast ms` "
        "with those that the device prefers; `roofline ms` is of the latter.",
        *(f"- {each}" for each in failures),
        _table(rows),
        *(f"- Not exported: {each}" for each in manifest["left_out"]),
    ]
    return "\n\n".join(text) + "\n", not failures


def _of_function(
    runner: _Runner, folder: Path, function: Function, peaks: dict[str, float]
) -> dict[str, str]:
    """Returns the cells of a function's row."""
    text = gzip.decompress((folder / f"{function.file}.mlir.gz").read_bytes()).decode()
    with np.load(folder / f"{function.file}.npz") as stored:
        expected = dict(stored)
    arguments = arguments_of(function)
    results, measured = runner.run(text, arguments)
    # Behind them are variables that were assigned.
    number = len({name.partition(" ")[0] for name in expected})
    worst = difference(expected, sampled(results[:number]), function.tolerance)
    row = {
        "difference": f"{worst:.2g}",
        "ms": f"{measured['ms']:.3g}",
    }
    fast = text.replace("HIGHEST", "DEFAULT")
    if fast != text:
        _, measured = runner.run(fast, arguments)
        row["fast ms"] = f"{measured['ms']:.3g}"
    if peaks and measured.keys() >= {"flops", "bytes"}:
        half = any("float16" in each.dtype for each in function.arguments)
        peak = peaks["bfloat16" if half else "tf32"]
        least = max(measured["flops"] / peak, measured["bytes"] / peaks["bandwidth"])
        row["roofline ms"] = f"{1e3 * least:.3g}"
        row["of roofline"] = f"{1e3 * least / measured['ms']:.0%}"
    if "temporary MiB" in measured:
        row["temporary MiB"] = f"{measured['temporary MiB']:.1f}"
    row["compiled in s"] = f"{measured['compiled in s']:.1f}"
    return row


def _peaks(devices: dict[str, dict[str, float]], kind: str) -> dict[str, float]:
    """Returns the data sheet of a device by its driver's name, if one alone fits."""
    words = kind.lower().replace("-", " ").split()
    found = [name for name in devices if name.partition("-")[0] in words]
    return devices[found[0]] if len(found) == 1 else {}


def _table(rows: Sequence[dict[str, str]]) -> str:
    header = list(dict.fromkeys(name for row in rows for name in row))
    lines = [header, ["---"] * len(header)]
    lines += [[row.get(name, "") for name in header] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Runs a folder's functions, writes the report, and exits with 1 for failures."""
    parser = argparse.ArgumentParser(description="Runs exported functions by JAX.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--platform", help="gpu, tpu or cpu; what JAX prefers")
    parser.add_argument("--repeats", type=int, default=20)
    flags = parser.parse_args()
    text, agrees = check(flags.folder, flags.platform, flags.repeats)
    title = text.partition("\n")[0].rpartition(" on ")[2]
    path = flags.folder / f"report-{title.replace(' ', '-')}.md"
    path.write_text(text, "utf-8")
    print(f"\n{text}\n{path}")
    sys.exit(not agrees)


if __name__ == "__main__":
    main()
