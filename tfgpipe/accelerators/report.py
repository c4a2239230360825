"""`dry_run`: what a training step would do on devices that are not here."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import keras

from tfgpipe import planner
from tfgpipe._compat import functions, grappler
from tfgpipe._util import readable_bytes, text_table
from tfgpipe.accelerators import compilers, placement, steps
from tfgpipe.accelerators.compilers import Compiled
from tfgpipe.accelerators.placement import HOST, Copy, Operation
from tfgpipe.accelerators.platforms import (
    GpuTarget,
    Platform,
    find,
    roofline_seconds,
)
from tfgpipe.accelerators.stage_functions import StageModules, stage_calls
from tfgpipe.report import device_memory

_GRADIENT = "gradient_tape/"
# Rows of a table of the report.
_MOST_ROWS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionReport:
    """A function that a step calls on a device.

    Attributes:
        name: Its name, such as `stage_forward`.
        function: Its name in the graph of the step.
        device: The index of its device.
        calls: Number of its calls in a step there.
        peak_bytes: The most that it holds, by Grappler's estimate.
        planned_seconds: Time by the planner's estimate, the mean over the stages of its
            device; None where the planner has none.
        compiled: The report of the platform's compiler, or None.
    """

    name: str
    function: str
    device: int
    calls: int
    peak_bytes: int
    planned_seconds: float | None = None
    compiled: Compiled | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Copies of one kind, of a layer.

    Attributes:
        what: The operation whose result is copied, or `argument`.
        reader: The operation that reads it.
        layer: The layer of the operation.
        source: From the memory of which device, or `HOST`.
        target: The device that it is copied to.
        in_loop: True if it is in the functions of stages, for each microbatch.
        count: Number in a step.
        num_bytes: All that is copied in a step.
    """

    what: str
    reader: str
    layer: str
    source: int
    target: int
    in_loop: bool
    count: int
    num_bytes: int

    @property
    def waits(self) -> bool:
        """True if the host waits for the device."""
        return self.target == HOST


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryRun:
    """A training step on a platform that is not here; `print` it for a report.

    Attributes:
        platform: The platform.
        devices: The devices of the trace, in whose place those of the platform are.
        on_host: Operations that have no kernel for their types on the devices: how
            often in a step, by operation. The host runs them, or a TPU once XLA has
            compiled them one by one. On TPUs nothing that XLA compiles as a function.
        transfers: Copies between the devices, and between GPUs and the host.
        functions: The stage functions on each device.
        state: Weights and slots in words, a line a device.
        estimate: Time and memory of the step by the planner.
        layers: The names of the layers.
        updates: The compiler's report on the optimizer's update of each stage.
        left_out: The part that was left out, with the reason; empty if nothing was.
        dtype: The type that products are computed in.
    """

    platform: Platform
    devices: tuple[str, ...]
    on_host: Mapping[Operation, int]
    transfers: Sequence[Transfer]
    functions: Sequence[FunctionReport]
    state: Sequence[str]
    estimate: planner.Estimate
    layers: tuple[str, ...]
    updates: Mapping[int, Compiled]
    left_out: str
    dtype: str

    def __str__(self) -> str:
        return "\n\n".join(self._sections())

    def _sections(self) -> Iterator[str]:
        names = ", ".join(self._device(i) for i in range(len(self.devices)))
        yield (
            f"A training step on {len(self.devices)} x {self.platform.name}, traced "
            f"and not run: {names}."
        )
        between = [x for x in self.transfers if HOST not in (x.source, x.target)]
        others = [x for x in self.transfers if HOST in (x.source, x.target)]
        yield self._kernels()
        if self.platform.kind == "gpu":
            loop = [x for x in others if x.in_loop]
            once = [x for x in others if not x.in_loop]
            yield self._copies("From host to GPU and back, for each microbatch", loop)
            yield self._copies("From host to GPU and back, once a step", once)
        yield self._copies("From device to device", between)
        yield "Weights and slots\n" + "\n".join(self.state)
        yield self._memory()
        yield self._functions()

    def _device(self, index: int) -> str:
        return "host" if index == HOST else f"{self.platform.kind.upper()}:{index}"

    def _kernels(self) -> str:
        kind, where = "GPU", "which run on the host"
        if self.platform.kind == "tpu":
            kind, where = "TPU", "compiled on demand or run on the host"
        if not self.on_host:
            return f"Every operation on a {kind} has a kernel there."
        rows = collections.Counter[tuple[str, ...]]()
        for operation, count in self.on_host.items():
            types = ", ".join(operation.dtypes)
            layer = layer_of(operation.name, self.layers)
            rows[(operation.op, types, layer, self._device(operation.device))] += count
        table = text_table(
            ("operation", "types", "layer", "device", "times"),
            [(*row, f"{count:,}") for row, count in rows.most_common(_MOST_ROWS)],
            left=("operation", "types", "layer", "device"),
        )
        return f"Operations without a kernel, {where}\n{table}"

    def _copies(self, title: str, found: list[Transfer]) -> str:
        waits = sum(each.count for each in found if each.waits)
        size = readable_bytes(sum(each.num_bytes for each in found))
        number = sum(each.count for each in found)
        title = f"{title}: {number:,} copies a step, {size}"
        if waits:
            title += f"; the host waits for {waits:,} of them"
        # Those that somebody waits for first.
        found.sort(key=lambda each: (not each.waits, -each.count, -each.num_bytes))
        rows = [
            (
                self._device(each.source),
                self._device(each.target),
                each.what,
                each.reader,
                each.layer,
                f"{each.count:,}",
                readable_bytes(each.num_bytes),
            )
            for each in found
        ]
        header = ("from", "to", "result of", "for", "layer", "times", "bytes")
        table = text_table(header, rows[:_MOST_ROWS], left=header[:5])
        more = len(rows) - _MOST_ROWS
        return "\n".join(
            [title, *([table] if rows else []), *([f"... {more} more"] * (more > 0))]
        )

    def _memory(self) -> str:
        rows = []
        for p, held in enumerate(self.estimate.memory):
            peaks = [each.peak_bytes for each in self.functions if each.device == p]
            rows.append(
                (
                    self._device(p),
                    readable_bytes(int(held.total)),
                    held.largest,
                    readable_bytes(int(held.workspace + held.recomputed)),
                    readable_bytes(max(peaks, default=0)),
                )
            )
        capacity = readable_bytes(int(self.platform.memory_bytes))
        header = ("device", "step", "most of it", "one function", "by Grappler")
        table = text_table(header, rows, left=("device", "most of it"))
        plan = f"{self.estimate.config}, of {capacity}"
        return f"Memory by the planner with {plan}\n{table}"

    def _functions(self) -> str:
        """Returns a row for each stage function, and what does not compile."""
        updates = [
            FunctionReport(
                name="update", function="", device=k, calls=1, peak_bytes=0, compiled=c
            )
            for k, c in self.updates.items()
        ]
        called = [*self.functions, *updates]
        header = ["function", "device", "calls", "by Grappler", "planned us"]
        if any(each.compiled for each in called):
            header += ["arguments", "results", "temporary", "code", "FLOPs"]
            header += ["roofline us", "compiled in s"]
        rows, remarks = [], []
        for each in called:
            planned = each.planned_seconds
            row = [
                each.name,
                self._device(each.device),
                f"{each.calls:,}",
                readable_bytes(each.peak_bytes) if each.peak_bytes else "-",
                "-" if planned is None else f"{1e6 * planned:,.1f}",
            ]
            if each.compiled is not None:
                row += self._compiled(each.compiled)
                if each.compiled.error:
                    remarks.append(f"{row[0]} on {row[1]}: {each.compiled.error}")
                elif each.peak_bytes > 2 * each.compiled.total_bytes:
                    remarks.append(
                        f"{row[0]} on {row[1]}: by Grappler more than twice what the "
                        f"compiler needs, {readable_bytes(each.compiled.total_bytes)}."
                    )
            rows.append(row)
        table = text_table(header, rows, left=header[:2])
        return "\n".join(filter(None, [table, *remarks, self.left_out]))

    def _compiled(self, found: Compiled) -> list[str]:
        if found.error:
            return [*("-" * 6), "no"]
        least = roofline_seconds(
            found.flops, found.bytes_accessed, self.platform, dtype=self.dtype
        )
        sizes = (found.argument_bytes, found.output_bytes, found.temp_bytes)
        return [
            *map(readable_bytes, (*sizes, found.code_bytes)),
            f"{found.flops:.3g}",
            f"{1e6 * least:,.1f}",
            f"{found.seconds:.1f}",
        ]


def dry_run(
    model: keras.Model, *, batch: Any, platform: str, compiles: bool = True
) -> DryRun:
    """Describes a training step of a model on other devices.

    The step is traced, optimized by TensorFlow's Grappler for these devices, and
    compared with the kernels that TensorFlow has for them. Nothing runs, no such device
    is needed, and the model stays as it is. For GPUs kernels and copies are those of
    `jit_compile=False`.

    Args:
        model: A compiled model with a pipeline in it, on logical CPUs for example. If
            it is not built, it is built for the batch.
        batch: The batch of a step, `(x, y)` or `(x, y, sample_weight)`: arrays, tensors
            or `tf.TensorSpec`. With replicas it is the batch of one of them.
        platform: The devices, such as `"h100-80g"`, `"a100-40g"` or `"tpu-v5e"`.
        compiles: True to compile stage functions and updates by XLA for the platform as
            well, some seconds each. Needs the packages of `tfgpipe[compilers]`; without
            these the report says that this is left out.

    Raises:
        ValueError: If there is no such platform, if the model has no pipeline or is not
            compiled, or if a size of the batch is not known.

    Example:

    >>> tfgpipe.make_logical_cpus(8)
    >>> layers = [keras.layers.Dense(8) for _ in range(4)]
    >>> model = tfgpipe.PipelinedModel(layers, num_stages=2, num_microbatches=2)
    >>> model.compile("sgd", "mse")
    >>> batch = np.zeros((4, 8), "float32"), np.zeros((4, 8), "float32")
    >>> report = tfgpipe.dry_run(model, batch=batch, platform="h100-80g")
    >>> len(report.on_host), len(report.functions)
    (0, 4)
    """
    (report,) = dry_runs(
        model, batch=batch, platforms=[find(platform)], compiles=compiles
    )
    return report


def dry_runs(
    model: keras.Model,
    *,
    batch: Any,
    platforms: Sequence[Platform],
    compiles: bool = True,
) -> Iterator[DryRun]:
    """Yields the dry runs of a model for several platforms.

    The step is traced and lowered once for GPUs, and once for TPUs.

    Args:
        model: The model, as of `dry_run`.
        batch: The batch of a step, as of `dry_run`.
        platforms: The platforms.
        compiles: True to compile functions by XLA as well, as of `dry_run`.
    """
    traced: dict[str, StageModules] = {}
    for platform in platforms:
        if platform.kind not in traced:
            step = steps.trace(
                model, batch, platform="GPU" if platform.kind == "gpu" else "TPU"
            )
            traced[platform.kind] = StageModules(step)
        yield _dry_run(traced[platform.kind], batch, platform, compiles=compiles)


def _dry_run(
    modules: StageModules, batch: Any, platform: Platform, *, compiles: bool
) -> DryRun:
    step = modules.step
    gpus = [
        f"{name.rpartition('/')[0]}/device:GPU:{i}"
        for i, name in enumerate(step.devices)
    ]
    on_gpus = steps.on_other_devices(step, gpus)
    cluster = grappler.VirtualCluster(_properties(platform, gpus))
    optimized = cluster.optimize_functions(on_gpus)
    kind: Literal["GPU", "TPU"] = "TPU" if platform.kind == "tpu" else "GPU"
    placed = placement.place(step.graph, optimized, step.devices, gpus, kind)
    copies = {
        copy: times
        for copy, times in placed.copies.items()
        # A TPU may compile on demand what a host would run here.
        if kind == "GPU" or HOST not in (copy.source, copy.target)
    }
    layers = steps.layer_names(step)
    called = _functions(step, optimized, cluster)
    updates: Mapping[int, Compiled] = {}
    left_out = _left_out(platform, compiles=compiles)
    if not left_out:
        names = [each.function for each in called]
        compiled, updates = modules.compile(names, platform)
        called = [
            dataclasses.replace(each, compiled=compiled[each.function])
            for each in called
        ]
    workload = planner.read(
        step.pipeline.pipeline.captured,
        name=step.model.name,
        remat=step.pipeline.config.remat,
    )
    estimate, planned = _plan(step, platform, workload, batch)
    called = [
        dataclasses.replace(each, planned_seconds=planned[p].get(each.name))
        for each in called
        for p in [each.device // step.pipeline.mesh.num_shards % len(planned)]
    ]
    return DryRun(
        platform=platform,
        devices=step.devices,
        on_host=placed.on_host,
        transfers=_transfers(copies, layers),
        functions=called,
        state=_state(step.model),
        estimate=estimate,
        layers=layers,
        updates=updates,
        left_out=left_out,
        dtype=workload.dtype,
    )


def _left_out(platform: Platform, *, compiles: bool) -> str:
    """Returns the reason that nothing is compiled, empty if it is."""
    if not compiles:
        return "Not compiled: compiles=False."
    if packages := compilers.missing(platform):
        return (
            f"Not compiled: {', '.join(packages)} are not installed. "
            "Install the extra `compilers`."
        )
    return ""


def _properties(platform: Platform, gpus: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Describes devices to Grappler. To it a TPU is like an A100."""
    target = platform.target
    if not isinstance(target, GpuTarget):
        target = find("a100-40g").target
        assert isinstance(target, GpuTarget)
    major, minor = target.compute_capability
    gpu = {
        "type": "GPU",
        "vendor": "NVIDIA",
        "model": target.name,
        "frequency": int(1e3 * target.clock_ghz),
        "num_cores": target.num_multiprocessors,
        "memory_size": int(platform.device.memory),
        "bandwidth": int(platform.device.bandwidth / 1e3),  # KB/s.
        "environment": {"architecture": f"{major}.{minor}", "cudnn": "9000"},
    }
    cpu = {"type": "CPU", "frequency": 2500, "num_cores": 8, "memory_size": 2**36}
    host = gpus[0].replace("GPU:", "CPU:")
    return {**dict.fromkeys(gpus, gpu), host: cpu}


def _transfers(copies: Mapping[Copy, int], layers: Sequence[str]) -> list[Transfer]:
    """Returns copies, added up for each kind and layer."""
    counts: collections.Counter[tuple[Any, ...]] = collections.Counter()
    sizes: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for copy, times in copies.items():
        operation = copy.operation
        reader = copy.reader.rpartition("/")[2]
        if not operation.function:
            reader = placement.without_number(reader)
        key = (
            operation.op or "argument",
            re.sub(r"^\w+?(_\d+)?\(", "(", reader) if "(" in reader else reader,
            layer_of(operation.name, layers),
            copy.source,
            copy.target,
            _is_stage(operation.function) or _is_stage(operation.name),
        )
        counts[key] += times
        sizes[key] += times * copy.num_bytes
    names = ("what", "reader", "layer", "source", "target", "in_loop")
    return [
        Transfer(
            **dict(zip(names, key, strict=True)), count=count, num_bytes=sizes[key]
        )
        for key, count in counts.items()
    ]


def layer_of(name: str, layers: Sequence[str]) -> str:
    """Returns the layer that an operation is of, or its own scope.

    >>> layer_of("gradient_tape/dense_1_2/MatMul", ["dense_1"])
    'dense_1'
    >>> layer_of("AddN_2", ["dense_1"])
    ''

    Args:
        name: The name of the operation.
        layers: The names of all layers. One that is called again has a number after it.
    """
    scope, inside, _ = name.removeprefix(_GRADIENT).partition("/")
    known = placement.without_number(scope)
    if known in layers and scope not in layers:
        return known
    return scope if inside else ""


def _is_stage(name: str) -> bool:
    """Returns whether an operation of a step calls a function of a stage."""
    return name.rpartition("/")[2].startswith("stage_")


def _functions(
    step: steps.Step, optimized: Any, cluster: grappler.VirtualCluster
) -> list[FunctionReport]:
    """Returns the stage functions of a step, with Grappler's estimates."""
    library = {f.signature.name: f for f in optimized.library.function}
    calls: collections.Counter[tuple[str, str, int]] = collections.Counter()
    index = {name: i for i, name in enumerate(step.devices)}
    for op, function in stage_calls(step, library):
        calls[(placement.without_number(op.name), function, index[op.device])] += 1
    graphs = functions.graphs_of_functions(optimized.library)
    peaks = {name: cluster.peak_bytes(graphs[name]) for _, name, _ in calls}
    return [
        FunctionReport(
            name=name,
            function=function,
            device=device,
            calls=count,
            peak_bytes=peaks[function],
        )
        for (name, function, device), count in sorted(
            calls.items(), key=lambda item: (item[0][2], item[0][0])
        )
    ]


def _state(model: keras.Model) -> list[str]:
    """Returns the layers, weights and slots of each device, a line each."""
    grid = itertools.chain.from_iterable(
        stage for replica in device_memory(model) for stage in replica
    )
    return [f"{i}: {held.lines[2]}; {held.layers}" for i, held in enumerate(grid)]


def _plan(
    step: steps.Step, platform: Platform, workload: planner.Workload, batch: Any
) -> tuple[planner.Estimate, list[dict[str, float]]]:
    """Returns the planner's estimates of the step, and of each device's functions.

    The latter are mean seconds, by the name of the function.
    """
    pipelined = step.pipeline
    mesh, schedule = pipelined.mesh, steps.schedule(step.model, pipelined)
    config = planner.ParallelConfig(
        num_replicas=mesh.num_replicas,
        num_devices=schedule.num_devices,
        num_shards=mesh.num_shards,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule,
        remat=pipelined.config.remat,
        stages_per_device=schedule.num_stages // schedule.num_devices,
    )
    request = planner.PlanRequest(
        workload,
        device=platform.device,
        num_devices=config.total_devices,
        batch_size=steps.batch_size(batch) * mesh.num_replicas,
        num_slots=steps.num_slots(step.model),
    )
    sizes = [len(stage.segment.calls) for stage in pipelined.stages]
    times = request.stage_times(config, sizes)
    means = []
    for p in range(schedule.num_devices):
        mine = [x for x, q in zip(times, schedule.placement, strict=True) if p == q]
        forward, backward = (
            statistics.mean(getattr(x, name) for x in mine)
            for name in ("forward", "backward")
        )
        again = statistics.mean(x.recompute for x in mine)
        means.append({"stage_forward": forward, "stage_backward": backward + again})
    return request.estimate(config, sizes), means
