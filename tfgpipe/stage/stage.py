"""A stage: consecutive calls of a network, and the programs that run them.

Programs are built on first use for each way of running (shapes of the inputs, training
or not, which weights are trainable, rematerialised or not) and kept.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import show_progress
from tfgpipe.capture import Part, Replay, Wire, layer_variables
from tfgpipe.devices import sharding
from tfgpipe.stage import dedup, layer_checks, normalization, program
from tfgpipe.stage.joint import Trace, trace_joint
from tfgpipe.stage.programs import Programs

Remat = Literal["stage", "layer", "except_last", "none"]
REMAT_MODES: tuple[Remat, ...] = ("stage", "layer", "except_last", "none")

Specs = Mapping[Wire, tf.TensorSpec]


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a stage is about to be run.

    Attributes:
        training: Whether layers run as in training; None leaves it to each.
        per_layer: Whether the backward recomputes layer by layer.
        may_be_empty: Whether microbatches without rows can occur.
        jit_compile: Whether XLA compiles the programs.
        batch_norm: When moving averages of batch statistics move: with each
            microbatch, or once a step.
        num_replicas: How many replicas some layers may sum over.
        constant: Numbers of values whose gradients nobody wants.
        on_cpu: Whether the programs run on a CPU.
        core: In a computation for TPUs the core they are for, else None.
        num_microbatches: How many there are in a step, or None if that is not known.
    """

    training: bool | None
    per_layer: bool
    may_be_empty: bool
    jit_compile: bool
    batch_norm: normalization.BatchNorm = "microbatch"
    num_replicas: int = 1
    constant: tuple[int, ...] = ()
    on_cpu: bool = False
    core: str | None = None
    num_microbatches: int | None = None

    @property
    def by_tensorflow_on_cpu(self) -> bool:
        """Whether TensorFlow's own kernels for CPUs run it."""
        return self.on_cpu and not self.jit_compile


@dataclasses.dataclass(frozen=True)
class StageCache:
    """What the stages of a model share, if it is the same.

    Attributes:
        functions: Their programs, by what they compute.
        traced: Their traces, by how their parts are described.
    """

    functions: program.FunctionCache = dataclasses.field(default_factory=dict)
    traced: dict[Hashable, tuple[Part, TracedStage]] = dataclasses.field(
        default_factory=dict
    )


class TracedStage:
    """A stage traced for one mode and one set of input shapes.

    Attributes:
        trace: The trace.
        reads: What its inputs are.
        makes: What its outputs are.
        unmasked: Values that lose their mask here.
        group: The number under which its replicas meet.
    """

    def __init__(
        self,
        stage_trace: Trace,
        replay: Replay,
        mode: Mode,
        group: int,
        library: StageCache,
    ) -> None:
        self.trace = stage_trace
        self.group = group
        self.reads = replay.reads
        self.makes = replay.makes
        self.unmasked = replay.unmasked
        self._mode = mode
        self._library = library
        self._programs: dict[bool, Programs] = {}

    def twin(self, group: int, numbers: Mapping[int, int]) -> TracedStage:
        """Returns a stage that computes the same, traced.

        Args:
            group: The number under which its replicas meet.
            numbers: For the number of each value of this stage, that of the other.
        """
        twin = copy.copy(self)  # With the same dictionary of programs.
        twin.group = group
        twin.reads, twin.makes = (
            tuple(Wire(numbers[wire.number], wire.is_mask) for wire in wires)
            for wires in (self.reads, self.makes)
        )
        twin.unmasked = tuple(numbers[n] for n in self.unmasked)
        return twin

    @property
    def recomputing(self) -> Programs:
        """Programs that keep only the stage's inputs for the backward."""
        return self._built(saves=False)

    @property
    def saving(self) -> Programs:
        """Programs that keep what spares the backward any recomputation."""
        return self._built(saves=True)

    @property
    def output_specs(self) -> dict[Wire, tf.TensorSpec]:
        """Shapes and types of what the stage makes."""
        specs = map(self.trace.spec, self.trace.outputs)
        return dict(zip(self.makes, specs, strict=True))

    def changed(self, state: Sequence[keras.Variable]) -> list[keras.Variable]:
        """Returns which of the stage's `state` a forward changes."""
        names = zip(self.trace.state, self.trace.new_state, strict=True)
        return [v for v, (old, new) in zip(state, names, strict=True) if old != new]

    def _built(self, *, saves: bool) -> Programs:
        if saves not in self._programs:
            options = program.Options(
                saves=saves,
                may_be_empty=self._mode.may_be_empty,
                jit_compile=self._mode.jit_compile,
                on_cpu=self._mode.by_tensorflow_on_cpu,
                core=self._mode.core,
                num_microbatches=self._mode.num_microbatches,
            )
            self._programs[saves] = Programs(
                self.trace, options, self._library.functions
            )
        return self._programs[saves]


class Stage:
    """A part of a network that runs on one device.

    Attributes:
        index: k, counted from the pipeline's input.
        part: Its calls.
    """

    def __init__(
        self,
        index: int,
        part: Part,
        library: StageCache,
        borrowed: Sequence[keras.Variable] = (),
    ) -> None:
        self.index = index
        self.part = part
        self._library = library
        self._traced: dict[Hashable, dict[tuple[tf.TensorSpec, ...], TracedStage]] = {}
        self._groups: dict[Hashable, int] = {}
        # Variables of other layers, such as an embedding whose transpose is a function
        # of this stage. Only a trace tells.
        self._borrowed = list(borrowed)

    @property
    def layers(self) -> tuple[Any, ...]:
        """The layers, each once, in the order they are first called."""
        return self.part.layers

    @property
    def weights(self) -> list[keras.Variable]:
        """The trainable variables, each once."""
        return layer_variables(self.layers, self._borrowed)[0]

    @property
    def state(self) -> list[keras.Variable]:
        """All other variables: statistics, seeds, frozen weights."""
        return layer_variables(self.layers, self._borrowed)[1]

    @property
    def shards(self) -> dict[int, int]:
        """By `id` of each variable that is part of a weight, of which shard."""
        return sharding.numbers(self.layers)

    def extended(self, part: Part, borrowed: Sequence[keras.Variable]) -> Stage:
        """Returns a stage that shares programs with this one, of a longer part.

        Args:
            part: The calls, these among them.
            borrowed: Variables that the others use and that no layer owns.
        """
        # Loss and metrics learn of a trace what the trace does not show: whether there
        # are masks. So none of another model's serves.
        return Stage(self.index, part, StageCache(self._library.functions), borrowed)

    def traced(
        self,
        specs: Specs,
        mode: Mode,
        *,
        begins: Callable[[], None] = lambda: None,
    ) -> TracedStage:
        """Returns the stage traced for these inputs, from memory if it was before.

        Called eagerly on shapes that vary, it is traced once for the first and once for
        all that follow, sizes that vary left open. (In a graph it is TensorFlow that
        decides which sizes are open, and known ones give known ones.)

        Args:
            specs: Shapes and types of all that is there, of which it takes its own.
            mode: How it is to run.
            begins: Called before the stage is traced, if it is not known.
        """
        reads = {wire: s for wire, s in specs.items() if wire.number in self.part.reads}
        # Freezing a layer can change what it does beside what is trained.
        frozen = tuple(keras_internals.is_trainable(layer) for layer in self.layers)
        own, _ = layer_variables(self.layers)
        key = (tuple(reads), mode, tuple(map(id, own)), frozen)
        known = self._traced.get(key, {})
        # One for whatever sizes: those of replicas may differ. TensorFlow remembers for
        # good what was summed under a number, so none may come twice: seeds, as of
        # `random`, do not reach this one.
        group = self._groups.setdefault(key, secrets.randbits(31))
        exact = tuple(reads.values())
        if exact in known:
            return known[exact]
        if known and tf.executing_eagerly():
            relaxed = functools.reduce(_relaxed, known, exact)
            if relaxed in known:
                return known[relaxed]
            # A layer may need to know a size; then each is traced by itself.
            with contextlib.suppress(TypeError, ValueError):
                traced = self._trace(tuple(reads), relaxed, mode, group, begins)
                return self._traced.setdefault(key, {}).setdefault(relaxed, traced)
        traced = self._trace(tuple(reads), exact, mode, group, begins)
        return self._traced.setdefault(key, {}).setdefault(exact, traced)

    def _trace(
        self,
        wires: Sequence[Wire],
        specs: Sequence[tf.TensorSpec],
        mode: Mode,
        group: int,
        begins: Callable[[], None],
    ) -> TracedStage:
        layer_checks.check_not_float8(self.layers)
        constant = tuple(i for i, w in enumerate(wires) if w.number in mode.constant)
        key: Hashable = None
        described = None if self._borrowed else dedup.description(self.part)
        if described is not None:
            numbers = dedup.numbering(self.part)
            key = (
                described,
                tuple((numbers.index(wire.number), wire.is_mask) for wire in wires),
                tuple(specs),
                dataclasses.replace(mode, constant=constant),
            )
            if key in self._library.traced:
                part, traced = self._library.traced[key]
                pairs = zip(dedup.numbering(part), numbers, strict=True)
                return traced.twin(group, dict(pairs))
        begins()
        while True:
            replay = Replay(
                self.part,
                wires,
                training=mode.training,
                per_layer=mode.per_layer,
                borrowed=self._borrowed,
            )
            with normalization.converted(self.layers, mode.batch_norm):
                stage_trace = trace_joint(
                    replay.body,
                    input_specs=specs,
                    weights=self.weights,
                    state=self.state,
                    num_replicas=mode.num_replicas,
                    constant=constant,
                    on_cpu=mode.by_tensorflow_on_cpu,
                    numbers=self.shards,
                )
            if not stage_trace.strangers:
                traced = TracedStage(stage_trace, replay, mode, group, self._library)
                # A trace that takes captured variables fits no other stage.
                shared = not (self._borrowed or stage_trace.refers_outside)
                if key is not None and shared:
                    self._library.traced[key] = self.part, traced
                return traced
            self._borrowed += stage_trace.strangers
            self._traced.clear()  # Those traces know nothing of these variables.


def trace_all(
    stages: Sequence[Stage],
    inputs: Specs,
    modes: Sequence[Mode],
    *,
    unit: str = "stage",
    remark: str = "; before the first step TensorFlow optimizes them",
) -> list[TracedStage]:
    """Traces stages one after another, each on what those before it make.

    Args:
        stages: The stages.
        inputs: Shapes and types of what is given.
        modes: For each stage, how it is to run.
        unit: What a stage is called where the progress is shown.
        remark: What is said there of what follows.
    """
    specs = dict(inputs)
    results = []
    total = len(stages)
    with show_progress(
        f"tracing {unit}", f"traced {total} {unit}s", total, remark=remark
    ) as begin:
        for k, (stage, mode) in enumerate(zip(stages, modes, strict=True), start=1):
            begins = functools.partial(begin, k)
            traced = stage.traced(specs, mode, begins=begins)
            specs.update(traced.output_specs)
            for number in traced.unmasked:
                del specs[Wire(number, True)]
            results.append(traced)
    return results


def owned_variables(
    stages: Sequence[Stage],
) -> list[tuple[Stage, list[keras.Variable]]]:
    """Returns for each stage its variables, those that stages share at the first."""
    owned = []
    seen: set[int] = set()
    for stage in stages:
        mine = [v for v in (*stage.weights, *stage.state) if id(v) not in seen]
        seen.update(map(id, mine))
        owned.append((stage, mine))
    return owned


def _relaxed(
    specs: tuple[tf.TensorSpec, ...], others: tuple[tf.TensorSpec, ...]
) -> tuple[tf.TensorSpec, ...]:
    """Returns specs with the sizes left open in which they differ from others.

    Specs of other types or ranks are no reason to, nor is the last axis of floats: it
    holds features, of which layers want the number that they were built for.
    """
    pairs = list(zip(specs, others, strict=True))
    for a, b in pairs:
        if a.dtype != b.dtype or a.shape.rank != b.shape.rank:
            return specs
        if a.dtype.is_floating and a.shape.rank > 1 and a.shape[-1] != b.shape[-1]:
            return specs
    return tuple(
        tf.TensorSpec(
            [m if m == n else None for m, n in zip(a.shape, b.shape, strict=True)],
            a.dtype,
        )
        for a, b in pairs
    )
