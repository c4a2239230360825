"""A stage: consecutive calls of layers, and the functions that run them.

Functions are made on first use for each way of running (shapes of the inputs, training
or not, which weights are trainable, rematerialised or not) and kept.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import secrets
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap, unique
from tfgpipe.capture import Interpreter, Segment, TensorKey, layer_variables
from tfgpipe.devices import sharding
from tfgpipe.graph import joint_graph, passes
from tfgpipe.remat import ForwardGraph, Remat
from tfgpipe.stage import dedup, layer_checks, normalization
from tfgpipe.stage.functions import FunctionCache, StageFunctions
from tfgpipe.stage.joint import trace_joint, trace_with_captured
from tfgpipe.stage.options import StageOptions
from tfgpipe.stage.progress import show_progress

Specs = Mapping[TensorKey, tf.TensorSpec]


@dataclasses.dataclass(frozen=True)
class StageCache:
    """Traces and functions that identical stages of a model share.

    Attributes:
        functions: Their functions, by what they compute.
        chains: The compiled functions of chains in these.
        traces: Their traces, by the structure of their calls.
    """

    functions: FunctionCache = dataclasses.field(default_factory=dict)
    chains: passes.ChainCache = dataclasses.field(default_factory=dict)
    traces: dict[Hashable, tuple[Segment, TracedStage]] = dataclasses.field(
        default_factory=dict
    )


class TracedStage:
    """A stage traced for one set of options and of input shapes.

    Attributes:
        trace: The trace.
        input_keys: Keys of its inputs.
        output_keys: Keys of its outputs.
        dropped_masks: Values that lose their mask here.
        group_key: The key of the group that its replicas sum in.
    """

    def __init__(
        self,
        trace: joint_graph.JointGraph,
        input_keys: Sequence[TensorKey],
        options: StageOptions,
        group_key: int,
        cache: FunctionCache,
    ) -> None:
        self.trace = trace
        self.group_key = group_key
        self.input_keys = tuple(input_keys)
        self.output_keys: tuple[TensorKey, ...] = trace.forward.keys
        self.dropped_masks = tuple(tensor.value_id for tensor in trace.forward.dropped)
        self.options = options
        self._cache = cache
        self._functions: dict[tuple[bool, tuple[str, ...]], StageFunctions] = {}
        self._saved: dict[Remat, tuple[str, ...]] = {}

    def like(self, group_key: int, ids: Mapping[int, int]) -> TracedStage:
        """Returns a structurally identical stage, traced.

        Args:
            group_key: The key of the group that its replicas sum in.
            ids: For the id of each value of this stage, that of the other.
        """
        stage = copy.copy(self)  # With the same dictionary of functions.
        stage.group_key = group_key
        stage.input_keys, stage.output_keys = (
            tuple(TensorKey(ids[tensor.value_id], tensor.is_mask) for tensor in tensors)
            for tensors in (self.input_keys, self.output_keys)
        )
        stage.dropped_masks = tuple(ids[value_id] for value_id in self.dropped_masks)
        return stage

    @property
    def with_remat(self) -> StageFunctions:
        """Functions whose backward recomputes what the policy does not save."""
        return self.saving(self.options.remat)

    def saving(self, remat: Remat) -> StageFunctions:
        """Returns functions that keep the stage's inputs and what a policy saves."""
        if not remat.saves_results:
            return self._make_functions(saves=False)
        if remat not in self._saved:
            self._saved[remat] = tuple(remat.saved(self.forward_graph))
        return self._make_functions(saves=False, saved=self._saved[remat])

    @property
    def forward_graph(self) -> ForwardGraph:
        """The operations that the backward runs again if nothing is saved."""
        return self._make_functions(saves=False).forward_graph

    @property
    def without_remat(self) -> StageFunctions:
        """Functions that keep what spares the backward any recomputation."""
        return self._make_functions(saves=True)

    @property
    def output_specs(self) -> dict[TensorKey, tf.TensorSpec]:
        """Shapes and types of what the stage makes."""
        specs = map(self.trace.spec, self.trace.forward.outputs)
        return dict(zip(self.output_keys, specs, strict=True))

    def static_value(self, output: TensorKey) -> np.ndarray | None:
        """Returns the value of an output that is a constant of the trace, or None."""
        name = self.trace.forward.outputs[self.output_keys.index(output)]
        tensor = self.trace.graph.get_tensor_by_name(name)
        while tensor.op.type in ("Identity", "IdentityN"):  # Of `tf.custom_gradient`.
            tensor = tensor.op.inputs[tensor.value_index]
        return tf.get_static_value(tensor)

    def changed(self, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
        """Returns the stage's variables that a forward changes."""
        pairs = zip(variables, self.trace.assigned.items(), strict=True)
        return [variable for variable, (before, after) in pairs if before != after]

    def _make_functions(
        self, *, saves: bool, saved: tuple[str, ...] = ()
    ) -> StageFunctions:
        key = saves, saved
        if key not in self._functions:
            self._functions[key] = StageFunctions(
                self.trace,
                self.options,
                saves=saves,
                saved=saved,
                cache=self._cache,
            )
        return self._functions[key]


@dataclasses.dataclass(frozen=True)
class _Request:
    """The key of a trace, beside the shapes of the stage's inputs."""

    input_keys: tuple[TensorKey, ...]
    options: StageOptions
    non_differentiable: tuple[int, ...]
    per_step: tuple[int, ...]


class Stage:
    """A segment of a model that runs on one device.

    Attributes:
        index: k, counted from the pipeline's input.
        segment: Its calls.
    """

    def __init__(
        self,
        index: int,
        segment: Segment,
        cache: StageCache,
        captured: Sequence[keras.Variable] = (),
    ) -> None:
        self.index = index
        self.segment = segment
        self._cache = cache
        self._traced: dict[Hashable, dict[tuple[tf.TensorSpec, ...], TracedStage]] = {}
        # By whose ids traces are found; kept, so that no other takes the id of one.
        self._keys: IdentityMap[keras.Variable, None] = IdentityMap()
        self._groups: dict[Hashable, int] = {}
        # Captured variables, of other layers, such as an embedding whose transpose this
        # stage uses. Only tracing finds them.
        self._captured = list(captured)

    @property
    def layers(self) -> tuple[Any, ...]:
        """The layers, each once, in the order they are first called."""
        return self.segment.layers

    @property
    def weights(self) -> list[keras.Variable]:
        """The trainable variables, each once."""
        return layer_variables(self.layers, self._captured)[0]

    @property
    def state(self) -> list[keras.Variable]:
        """All other variables: statistics, seeds, frozen weights."""
        return layer_variables(self.layers, self._captured)[1]

    @property
    def variables(self) -> list[keras.Variable]:
        """All of these."""
        return [*self.weights, *self.state]

    @property
    def shard_indices(self) -> IdentityMap[keras.Variable, int]:
        """Of each variable that is part of a weight, which shard."""
        return sharding.shard_indices(self.layers)

    def extend(self, segment: Segment, captured: Sequence[keras.Variable]) -> Stage:
        """Returns a stage that shares functions with this one, of a longer segment.

        Args:
            segment: The calls, these among them.
            captured: Variables that the others use and that no layer owns.
        """
        return Stage(self.index, segment, self._cache, captured)

    def traced(
        self,
        specs: Specs,
        options: StageOptions,
        *,
        non_differentiable: Collection[int] = (),
        per_step: Collection[int] = (),
        on_trace: Callable[[], None] = lambda: None,
    ) -> TracedStage:
        """Returns the stage traced for these inputs, from the cache if possible.

        Called eagerly on shapes that vary, it is traced once for the first and once for
        all that follow, sizes that vary left open. (In a graph it is TensorFlow that
        decides which sizes are open, and known ones give known ones.)

        Args:
            specs: Shapes and types of all that is there, of which it takes its own.
            options: Its options.
            non_differentiable: Ids of values that want no gradient.
            per_step: Ids of values that are the same for all microbatches.
            on_trace: Called before the stage is traced, if it is not known.
        """
        if self.shard_indices:  # XLA compiles for one device.
            options = dataclasses.replace(options, jit_compile=False)
        inputs = {
            key: spec
            for key, spec in specs.items()
            if key.value_id in self.segment.input_ids
        }

        def positions(ids: Collection[int]) -> tuple[int, ...]:
            return tuple(i for i, key in enumerate(inputs) if key.value_id in ids)

        request = _Request(
            tuple(inputs), options, positions(non_differentiable), positions(per_step)
        )
        # Freezing a layer can change more than what is trained.
        frozen = tuple(
            keras_internals.layers.is_trainable(layer) for layer in self.layers
        )
        own, _ = layer_variables(self.layers)
        self._keys.update((variable, None) for variable in own)
        key = (request, tuple(map(id, own)), frozen)
        known = self._traced.get(key, {})
        # One for whatever sizes: those of replicas may differ. TensorFlow never forgets
        # a group key, so none may come twice: seeds, as of `random`, do not reach this.
        group_key = self._groups.setdefault(key, secrets.randbits(31))
        exact = tuple(inputs.values())
        if exact in known:
            return known[exact]
        if known and tf.executing_eagerly():
            relaxed = functools.reduce(_relax_sizes, known, exact)
            if relaxed in known:
                return known[relaxed]
            # A layer may need to know a size; then each is traced by itself.
            with contextlib.suppress(TypeError, ValueError):
                traced = self._trace(request, relaxed, group_key, on_trace)
                return self._traced.setdefault(key, {}).setdefault(relaxed, traced)
        traced = self._trace(request, exact, group_key, on_trace)
        return self._traced.setdefault(key, {}).setdefault(exact, traced)

    def _trace(
        self,
        request: _Request,
        specs: Sequence[tf.TensorSpec],
        group_key: int,
        on_trace: Callable[[], None],
    ) -> TracedStage:
        layer_checks.check_not_float8(self.layers)
        alone = bool(self._captured) or request.options.remat.reads_names
        structure = None if alone else dedup.structure(self.segment)
        key: Hashable = None
        if structure is not None:
            ids = dedup.value_ids(self.segment)
            # The same calls on values of other ids: where these are is all that counts.
            key = (
                structure,
                tuple((ids.index(x.value_id), x.is_mask) for x in request.input_keys),
                tuple(specs),
                dataclasses.replace(request, input_keys=()),
            )
            if key in self._cache.traces:
                segment, traced = self._cache.traces[key]
                pairs = zip(dedup.value_ids(segment), ids, strict=True)
                return traced.like(group_key, dict(pairs))
        on_trace()
        trace = self._joint(request, specs)
        traced = TracedStage(
            trace, request.input_keys, request.options, group_key, self._cache.functions
        )
        # A trace that takes captured variables fits no other stage.
        if key is not None and not (self._captured or trace.has_captures):
            self._cache.traces[key] = self.segment, traced
        return traced

    def _joint(
        self, request: _Request, specs: Sequence[tf.TensorSpec]
    ) -> joint_graph.JointGraph:
        options = request.options
        num_captured = len(self._captured)

        def trace() -> joint_graph.JointGraph:
            interpreter = Interpreter(
                self.segment,
                request.input_keys,
                training=options.training,
                remat=options.remat,
                captured=self._captured,
            )
            return trace_joint(
                interpreter.run,
                input_specs=specs,
                weights=self.weights,
                state=self.state,
                num_replicas=options.num_replicas,
                non_differentiable=None
                if options.evaluates
                else request.non_differentiable,
                shard_indices=self.shard_indices,
            )

        try:
            with normalization.deferred_batch_norms(self.layers, options.batch_norm):
                joint = trace_with_captured(trace, self._captured)
        finally:
            if len(self._captured) > num_captured:
                self._traced.clear()  # Those traces lack these variables.
        per_step = tuple(joint.given.inputs[i] for i in request.per_step)
        joint = dataclasses.replace(joint, per_step=per_step)
        for rewrite in (*self._passes(options), *options.passes):
            joint = rewrite(joint)
        return joint

    def _passes(self, options: StageOptions) -> tuple[joint_graph.Pass, ...]:
        """Returns the rewritings of the joint graph for the stage's device."""
        return passes.platform_passes(
            None if options.compiles_functions else options.platform,
            accumulates=options.num_microbatches != 1,
            chain_cache=self._cache.chains if options.compiles_chains else None,
        )


def trace_all(
    stages: Sequence[Stage],
    inputs: Specs,
    options: Sequence[StageOptions],
    *,
    non_differentiable: Collection[int] = (),
    per_step: Collection[int] = (),
    unit: str = "stage",
    remark: str = "; before the first step TensorFlow optimizes them",
) -> list[TracedStage]:
    """Traces stages one after another, each on what those before it make.

    Args:
        stages: The stages.
        inputs: Shapes and types of what is given.
        options: For each stage, how it is to run.
        non_differentiable: Ids of values that want no gradient.
        per_step: Ids of values that are the same for all microbatches.
        unit: The name of a stage in the progress line.
        remark: A text at its end, on the step that follows.
    """
    specs = dict(inputs)
    results = []
    num_stages = len(stages)
    with show_progress(
        f"tracing {unit}", f"traced {num_stages} {unit}s", num_stages, remark=remark
    ) as begin:
        for k, stage in enumerate(stages):
            traced = stage.traced(
                specs,
                options[k],
                non_differentiable=non_differentiable,
                per_step=per_step,
                on_trace=functools.partial(begin, k + 1),
            )
            specs.update(traced.output_specs)
            for value_id in traced.dropped_masks:
                del specs[TensorKey(value_id, True)]
            results.append(traced)
    return results


def owned_variables(
    stages: Sequence[Stage],
) -> list[tuple[Stage, list[keras.Variable]]]:
    """Returns the variables of each stage; shared ones belong to the first."""
    owners: IdentityMap[keras.Variable, Stage] = IdentityMap()
    owned = []
    for stage in stages:
        new = unique(v for v in stage.variables if v not in owners)
        owners.update((variable, stage) for variable in new)
        owned.append((stage, new))
    return owned


def _relax_sizes(
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
