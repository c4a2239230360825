"""One model in one process, which trains a step on request.

Two workers that alternate measure two models under the same conditions: only one runs
at a time, each on its own cores, and other load on the machine affects both.

    with Worker(Side(workload="mlp")) as plain:
        plain.step().seconds
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tfgpipe.simulation import Timeline

Remat = Literal["none", "stage", "layer", "except_last", "products", "auto"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Precision = Literal["float32", "mixed_bfloat16", "mixed_float16", "int8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison: a workload, plain or pipelined.

    Attributes:
        workload: A name in `workloads.WORKLOADS`.
        sizes: Keyword arguments of the workload.
        num_stages: K, or None for the plain `keras.Sequential`.
        num_microbatches: M.
        schedule: The order of a `PipelinedModel`, or None for a `PipelinedLayer`.
        num_devices: P, or None for K.
        remat: What the pipeline rematerialises.
        precision: What layers compute in; `"int8"` for quantization-aware training in
            single precision.
        jit_compile: What XLA compiles: False for nothing, "auto" for what Keras or the
            pipeline chooses. None for nothing of a plain model, which is faster on
            CPUs, and for "auto" of a pipeline.
        executor: "parallel" is TensorFlow's own: operations of one stage run side by
            side wherever a core is idle, which fills the bubble and flatters the
            pipeline. "serial" runs a stage's operations one after another, as if each
            device had one core of its own.
        cores: The cores to run on, each with one thread for arithmetic.
    """

    workload: str
    sizes: dict[str, float] = dataclasses.field(default_factory=dict)
    num_stages: int | None = None
    num_microbatches: int = 1
    schedule: Schedule | None = None
    num_devices: int | None = None
    remat: Remat = "none"
    precision: Precision = "float32"
    jit_compile: bool | Literal["auto"] | None = None
    executor: Literal["parallel", "serial"] = "parallel"
    cores: tuple[int, ...] = (0,)

    @property
    def pipeline_jit_compile(self) -> bool | Literal["auto"]:
        """What XLA compiles of a pipeline."""
        return "auto" if self.jit_compile is None else self.jit_compile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What one training step took, and its loss.

    Attributes:
        seconds: Wall time.
        cpu_seconds: CPU time over all threads.
        stolen_seconds: CPU time that other work took on this side's cores meanwhile.
        loss: The loss before the update.
    """

    seconds: float
    cpu_seconds: float
    stolen_seconds: float
    loss: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graph:
    """Sizes of a train step's graph."""

    num_nodes: int
    num_functions: int
    num_function_nodes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Resident bytes before a step, and the most during it."""

    before: int
    peak: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Times of a step, and of parts of it that were timed separately.

    Attributes:
        seconds: The whole step.
        timeline: Its actions.
        accumulate: For each device, gradient accumulation over a step's microbatches.
        update: For each device, the optimizer's update of all weights.
    """

    seconds: float
    timeline: Timeline
    accumulate: tuple[float, ...]
    update: tuple[float, ...]


class Worker(contextlib.AbstractContextManager["Worker"]):
    """A process with one model.

    Args:
        side: What the model is. It is built before the constructor returns.
        for_memory: Whether tensors come from the system's allocator also where
            TensorFlow has oneDNN's operations on, whose pool keeps freed memory.
            `memory` needs that; steps are timed without.

    Raises:
        RuntimeError: If the process stops by itself.
    """

    def __init__(self, side: Side, *, for_memory: bool = False) -> None:
        self.side = side
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, side, for_memory))
        self._process.start()
        theirs.close()
        self.build_seconds: float = self._receive()

    def step(self) -> Step:
        """Trains one step."""
        self.begin()
        return self.end()

    def begin(self) -> None:
        """Begins a step; `end` waits for it."""
        self._connection.send("step")

    def end(self) -> Step:
        """Returns the step that was begun, when it is through."""
        return self._receive()

    def reset(self) -> None:
        """Sets the weights to their initial values."""
        self._ask("reset")

    def graph(self) -> Graph:
        """Traces the train step and counts the nodes of its graph."""
        return self._ask("graph")

    def memory(self) -> Memory:
        """Trains a step and measures the memory it takes.

        Raises:
            RuntimeError: If TensorFlow's allocator keeps what is freed, so that the
                process' resident memory does not tell what a step holds.
        """
        result: Memory | str = self._ask("memory")
        if isinstance(result, str):
            raise RuntimeError(result)
        return result

    def timeline(self) -> Timeline:
        """Trains a step and returns when its actions ran."""
        return self._ask("timeline")

    def profile(self) -> Profile:
        """Trains a step and returns what took how long."""
        return self._ask("profile")

    def expected_memory(self) -> int:
        """Returns the bytes that a step should take, over all devices."""
        return self._ask("expected_memory")

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join()

    def _ask(self, command: str) -> Any:
        self._connection.send(command)
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError(
                f"The worker for {self.side} stopped. What it said is above."
            ) from None


def _serve(connection: Connection, side: Side, for_memory: bool) -> None:
    """Runs in the process: builds the model, then obeys until the pipe closes."""
    # Before TensorFlow starts its threads, which inherit it.
    os.sched_setaffinity(0, side.cores)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    if for_memory:
        os.environ["TF_ONEDNN_USE_SYSTEM_ALLOCATOR"] = "1"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    num_devices = side.num_devices or side.num_stages or 1
    tf.config.threading.set_inter_op_parallelism_threads(num_devices)
    if side.num_stages is not None:
        import tfgpipe

        tfgpipe.make_logical_cpus(num_devices)
    if side.executor == "serial":
        _keep_sums_whole()
    start = time.perf_counter()
    trainer = _Trainer(side)
    connection.send(time.perf_counter() - start)
    while True:
        try:
            command = connection.recv()
        except EOFError:
            return
        connection.send(getattr(trainer, command)())


def _keep_sums_whole() -> None:
    """Switches TensorFlow's memory optimizer off.

    Where tensors are large it turns a sum into additions to a temporary variable, of a
    reference type, which the serial executor refuses. There is no public switch.
    """
    from tensorflow.python.eager import context

    config = context.context().config
    config.allow_soft_placement = True
    rewriting = config.graph_options.rewrite_options
    rewriting.memory_optimization = rewriting.NO_MEM_OPT
    options = context.FunctionCallOptions(config_proto=config)
    context.context().function_call_options = options


# Parameters of `mallopt`, from glibc's malloc.h.
_M_MMAP_THRESHOLD, _M_MMAP_MAX = -3, -4


class _Trainer:
    """The model of one side, with the data it trains on; lives in the process."""

    def __init__(self, side: Side) -> None:
        import keras
        import tensorflow as tf

        from benchmarks import workloads

        self._side = side
        workload = workloads.WORKLOADS[side.workload](**side.sizes)
        if side.precision != "int8":
            keras.config.set_dtype_policy(side.precision)
        self._workload = workload
        self._layers = workload.make_layers()
        if side.precision == "int8":
            self._layers = workloads.quantized(self._layers)
        self._x, self._y = map(tf.constant, workload.make_data())
        # XLA compiles for one device: each stage for itself, not the model.
        jit_compile = (side.jit_compile or False) if side.num_stages is None else False
        self._model = self._make_model(workload.make_model(self._layers))
        optimizer = keras.optimizers.SGD(0.01)
        self._model.compile(optimizer, workload.loss, jit_compile=jit_compile)
        self.reset()

    def _make_model(self, plain: Any) -> Any:
        import keras

        import tfgpipe

        side = self._side
        if side.num_stages is None:
            return plain
        ends = self._workload.stage_ends(self._layers, side.num_stages)
        arguments: dict[str, Any] = {
            "num_stages": side.num_stages,
            "num_microbatches": side.num_microbatches,
            "balance": ends or "params",
            "remat": side.remat,
            "jit_compile": side.pipeline_jit_compile,
        }
        if side.schedule is None:
            layer = tfgpipe.PipelinedLayer(plain, **arguments)
            inputs = keras.Input(plain.input_shape[1:], dtype=plain.input.dtype)
            return keras.Model(inputs, layer(inputs))
        devices = [f"CPU:{p}" for p in range(side.num_devices or side.num_stages)]
        return tfgpipe.PipelinedModel(
            plain, schedule=side.schedule, devices=devices, **arguments
        )

    def reset(self) -> None:
        from benchmarks import workloads

        workloads.set_weights(self._layers)

    def step(self) -> Step:
        busy_start = busy_seconds(self._side.cores)
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = float(self._train_step((self._x, self._y))["loss"])
        seconds = time.perf_counter() - start
        cpu_seconds = time.process_time() - cpu_start
        busy = busy_seconds(self._side.cores) - busy_start
        step = Step(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            stolen_seconds=busy - cpu_seconds,
            loss=loss,
        )
        self._model.reset_metrics()  # The loss is a running mean otherwise.
        return step

    def graph(self) -> Graph:
        definition = self._traced_step().graph.as_graph_def()
        functions = definition.library.function
        return Graph(
            num_nodes=len(definition.node),
            num_functions=len(functions),
            num_function_nodes=sum(len(function.node_def) for function in functions),
        )

    def memory(self) -> Memory | str:
        return memory_of(lambda: self._train_step((self._x, self._y)))

    def expected_memory(self) -> int:
        """Adds up gradients and activations, as `simulate` says how many are held.

        A microbatch in flight holds its stage's input, and without rematerialisation
        what the backward needs; a backward holds what its operations make. Gradients
        are made of accumulators after the last one.
        """
        import tensorflow as tf

        from tfgpipe import remat
        from tfgpipe._util import num_bytes, stage_spans
        from tfgpipe.capture import TensorKey
        from tfgpipe.costs import SegmentProfiler
        from tfgpipe.graph import peak_memory
        from tfgpipe.runtime import device_stages
        from tfgpipe.simulation import Costs, simulate
        from tfgpipe.stage import StageOptions, TracedStage

        side, pipeline = self._side, self._model.pipelined.pipeline
        rows = self._x.shape[0] // side.num_microbatches
        given = {TensorKey(0): tf.TensorSpec([rows, *self._x.shape[1:]], self._x.dtype)}
        spans = stage_spans([len(stage.segment.calls) for stage in pipeline.stages])
        policy = remat.find(side.remat)
        options = StageOptions(
            num_microbatches=side.num_microbatches,
            jit_compile=side.pipeline_jit_compile,
            platform="cpu",
        )
        traced = SegmentProfiler(pipeline.captured.graph, spans, given, options)
        sizes = traced.value_bytes()
        received = [
            sum(sizes[n] for n in stage.segment.input_ids) for stage in pipeline.stages
        ]
        recomputes = side.remat != "none"
        if recomputes:
            policies = policy.for_stages(
                len(traced.traced),
                lambda: device_stages(
                    pipeline.stages,
                    traced.traced,
                    self._model.schedule,
                    sizes_known=True,
                ),
            )
            functions = list(map(TracedStage.saving, traced.traced, policies))
            kept = [
                sum(num_bytes(stage.trace.spec(name)) for name in each.residuals)
                for stage, each in zip(traced.traced, functions, strict=True)
            ]
            during = [
                peak_memory.peak_bytes(each.backward.function.graph)
                for each in functions
            ]
        else:
            kept = [sum(each) for each in traced.saved_bytes()]
            during = traced.workspace_bytes(recomputes=False)
        held = [a + b for a, b in zip(received, kept, strict=True)]
        during_step, at_its_end = zip(
            *traced.step_bytes(recomputes=recomputes), strict=True
        )
        simulation = simulate(
            self._model.schedule,
            Costs(kept_bytes=held, backward_bytes=during, fixed_bytes=during_step),
        )
        last = [0] * len(simulation.peak_bytes)
        for p, count in zip(self._model.schedule.placement, at_its_end, strict=True):
            last[p] += count
        return int(sum(map(max, simulation.peak_bytes, last)))

    def timeline(self) -> Timeline:
        self._timed_step((self._x, self._y))
        return self._recorder.timeline(self._model.schedule)

    def profile(self) -> Profile:
        step = self._timed_step  # Traced.
        start = time.perf_counter()
        step((self._x, self._y))
        seconds = time.perf_counter() - start
        schedule = self._model.schedule
        return Profile(
            seconds=seconds,
            timeline=self._recorder.timeline(schedule),
            accumulate=tuple(
                self._accumulate_seconds(p) for p in range(schedule.num_devices)
            ),
            update=(self._update_seconds,) * schedule.num_devices,
        )

    @functools.cache  # noqa: B019 (The trainer lives as long as its process.)
    def _accumulate_seconds(self, device: int) -> float:
        """Times gradient accumulation of a step, deferred products included."""
        import tensorflow as tf

        from tfgpipe.capture import TensorKey

        schedule = self._model.schedule
        traced = self._model.pipelined.pipeline.begin(
            {TensorKey(0): self._x},
            schedule=schedule,
            training=True,
            outputs=(),
            per_step={},
        ).traced
        stages = [
            stage
            for stage, p in zip(traced, schedule.placement, strict=True)
            if p == device
        ]

        def total(given: list[dict[str, Any]]) -> list[Any]:
            results = []
            for stage, values in zip(stages, given, strict=True):
                sums = stage.without_remat.accumulation
                some = sums.begin()
                for _ in range(schedule.num_microbatches):
                    some = sums.add(some, values)
                results.append(sums.finalize(some))
            return results

        with tf.device(f"CPU:{device}"):
            given = [
                {
                    name: tf.ones(stage.trace.spec(name).shape)
                    for name in stage.without_remat.accumulation.addend_names
                }
                for stage in stages
            ]
            with self._executor():
                return _least_seconds(tf.function(total, autograph=False), given)

    @functools.cached_property
    def _update_seconds(self) -> float:
        """Times the optimizer's update of all weights, by gradients of zero."""
        import tensorflow as tf

        optimizer, weights = self._model.optimizer, self._model.trainable_weights

        def update() -> None:
            zeros = []
            for weight in weights:
                with tf.device(weight.value.device):
                    zeros.append(tf.zeros(weight.shape))
            optimizer.apply_gradients(zip(zeros, weights, strict=True))

        return _least_seconds(tf.function(update, autograph=False))

    @functools.cached_property
    def _train_step(self) -> Any:
        return self._as_fit_calls_it(self._traced_step())

    @functools.cached_property
    def _timed_step(self) -> Any:
        from tfgpipe.runtime import TimingRecorder

        self._recorder = self._model.recorder = TimingRecorder()
        step = self._traced_step()
        self._model.recorder = None
        return self._as_fit_calls_it(step)

    def _traced_step(self) -> Any:
        """Returns Keras' train step, compiled: what `fit` runs on every batch."""
        import tensorflow as tf

        # Applies to the calls that are traced here and stay calls: stage functions.
        # The train step itself runs outside, in the parallel executor.
        with self._executor():
            step = tf.function(
                self._model.train_step,
                autograph=False,
                jit_compile=self._model.jit_compile,
            )
            return self._as_fit_calls_it(step.get_concrete_function)((self._x, self._y))

    def _as_fit_calls_it(self, function: Any) -> Any:
        """Returns a function as a `PipelinedModel` has it called by Keras."""
        from tfgpipe._compat import functions

        return (
            function
            if self._side.schedule is None
            else functions.without_grappler(function)
        )

    def _executor(self) -> contextlib.AbstractContextManager[Any]:
        """What is called inside runs one operation after the other, if all does."""
        import tensorflow as tf

        executors = {"parallel": "", "serial": "SINGLE_THREADED_EXECUTOR"}
        return tf.experimental.function_executor_type(executors[self._side.executor])


def _least_seconds(function: Any, *args: Any) -> float:
    """Returns the least time that a call takes, of some."""
    function(*args)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        function(*args)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def memory_of(step: Callable[[], Any]) -> Memory | str:
    """Returns what a train step takes in this process, or why that is not known."""
    libc = ctypes.CDLL(None)
    # Returns freed tensors to the system immediately, so that resident memory is live
    # memory, without what each thread keeps for later.
    libc.mallopt(_M_MMAP_THRESHOLD, 2**16)
    libc.mallopt(_M_MMAP_MAX, 2**20)
    if not _frees_tensors():
        return (
            "Resident memory is not the memory of a step: TensorFlow's allocator keeps "
            "freed tensors, as oneDNN's does. Use `Worker(side, for_memory=True)`, "
            "which sets TF_ONEDNN_USE_SYSTEM_ALLOCATOR=1."
        )
    step()  # The first also takes what TensorFlow needs to prepare its functions.
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak, VmHWM.
    before = _resident("VmRSS")
    step()
    return Memory(before=before, peak=_resident("VmHWM"))


def _frees_tensors() -> bool:
    """Whether the memory of a tensor goes back to the system with the tensor."""
    import tensorflow as tf

    before = _resident("VmRSS")
    tensor = tf.fill((2**24,), 1.0)  # 64 MiB.
    held = _resident("VmRSS") - before
    del tensor
    return _resident("VmRSS") - before < held / 2


def _resident(field: str) -> int:
    """Returns a field of this process' status in bytes."""
    status = Path("/proc/self/status").read_text()
    (kibibytes,) = re.findall(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(kibibytes)


def busy_seconds(cores: tuple[int, ...]) -> float:
    """Returns how long cores have been busy since the machine started."""
    lines = Path("/proc/stat").read_text().splitlines()
    names = {f"cpu{core}" for core in cores}
    ticks = 0
    for name, *fields in (line.split() for line in lines):
        if name in names:
            user, nice, system, _idle, _iowait, *interrupts = map(int, fields[:8])
            ticks += user + nice + system + sum(interrupts)
    return ticks / os.sysconf("SC_CLK_TCK")
