"""A pipeline: a captured model, partitioned into stages on devices.

A step is emitted as TensorFlow operations, in schedule order, not in autodiff order.
Either as one operation with a gradient of its own (`run`); or, where the loss is a
value that the last stage makes, all actions in one go (`begin`, then `Executor.train`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe._compat import functions, keras_internals
from tfgpipe._util import IdentityMap, stage_spans
from tfgpipe.capture import (
    Call,
    CallGraph,
    TensorKey,
    Value,
    input_checks,
    source_model,
    tracer,
)
from tfgpipe.distribution import StageStrategy, current_strategy
from tfgpipe.remat import Remat
from tfgpipe.runtime import layer_probes, microbatch
from tfgpipe.runtime.differentiable import DifferentiableStep
from tfgpipe.runtime.executor import StepResult, Tensors
from tfgpipe.runtime.stages_held import device_stages
from tfgpipe.runtime.state import InitialState, read_variables
from tfgpipe.runtime.step import Step
from tfgpipe.schedules import DataFlow, Schedule
from tfgpipe.stage import (
    Boundary,
    Stage,
    StageCache,
    StageOptions,
    TracedStage,
    normalization,
    trace_all,
)

# Examples of which a loss is taken that a layer adds and that couples them.
AddedLosses = Literal["mini_batch", "microbatch"]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A captured model, its stages, their devices, and how they are run.

    Attributes:
        source: The source model, as the user gave it.
        captured: Its calls.
        stages: The K stages.
        strategy: Their strategy, with their devices.
        options: The user's options, to which the devices of stages and the step are
            added.
        probed: Results of the probes, by kind of layer and mode.
        added_losses: Examples of which added losses that couple them are taken.
        summed_losses: For each loss that a call adds whether it is a sum over examples,
            in training and not, as far as it has been found out.
        fitted_remats: Rematerialisation policies of the stages, by traces and schedule.
        coupled: The `CoupledLayers`, in training and not, as far as they are known.
    """

    source: source_model.SourceModel
    captured: tracer.CapturedModel
    stages: tuple[Stage, ...]
    strategy: StageStrategy
    options: StageOptions
    probed: Mapping[layer_probes.Probed, layer_probes.Found] = dataclasses.field(
        default_factory=dict
    )
    added_losses: AddedLosses = "mini_batch"
    summed_losses: dict[bool, IdentityMap[Call, tuple[bool, ...]]] = dataclasses.field(
        default_factory=dict
    )
    fitted_remats: dict[Hashable, tuple[Remat, ...]] = dataclasses.field(
        default_factory=dict, init=False
    )
    coupled: dict[bool, Any] = dataclasses.field(default_factory=dict, init=False)

    def of(self, captured: tracer.CapturedModel) -> Pipeline:
        """Returns the same stages of another capture of as many calls."""
        counts = [len(stage.segment.calls) for stage in self.stages]
        stages = make_stages(captured.graph, counts)
        return dataclasses.replace(
            self, captured=captured, stages=stages, summed_losses={}
        )

    @functools.cached_property
    def data_flow(self) -> DataFlow:
        """The data flow between the stages; the last one takes the loss of outputs."""
        counts = [len(stage.segment.calls) for stage in self.stages]
        return self.captured.graph.flow.grouped(counts)

    def repartition(self, calls_per_stage: Sequence[int]) -> Pipeline:
        """Returns the same model in stages of these numbers of calls."""
        stages = make_stages(self.captured.graph, calls_per_stage)
        return dataclasses.replace(self, stages=stages)

    def flatten_inputs(
        self, inputs: Any, side_inputs: Mapping[str, tf.Tensor]
    ) -> Tensors:
        """Returns the inputs of the pipeline: tensors, and the masks on them."""
        fed = self.source.flatten_inputs(self.captured, inputs, side_inputs)
        input_checks.check_equal_batches(
            {name: x for name, x in fed.items() if x is not None}
        )
        tensors = {}
        ids = self.captured.graph.input_ids
        for value_id, x in zip(ids, fed.values(), strict=True):
            if x is None:
                continue
            tensors[TensorKey(value_id)] = x
            mask = keras_internals.calls.get_mask(x)
            if mask is not None:
                tensors[TensorKey(value_id, True)] = mask
        return tensors

    def static_output_spec(self, inputs: Any, side_inputs: Mapping[str, Any]) -> Any:
        """Returns shapes and dtypes of the outputs if they are known without tracing.

        They are if the inputs have the captured shapes, apart from the batch size, and
        none of them has a mask, since a mask could change the outputs.

        Args:
            inputs: Tensors, symbolic or not.
            side_inputs: Side inputs, symbolic or not, by name.
        """
        specs, graph = self.captured.specs, self.captured.graph
        named = self.source.flatten_inputs(self.captured, inputs, side_inputs)
        fed = list(named.values())
        for value_id, x in zip(graph.input_ids, fed, strict=True):
            known = specs[value_id]
            if (
                x is None
                or keras_internals.calls.get_mask(x) is not None
                or keras.backend.standardize_dtype(x.dtype) != known.dtype
                or tuple(x.shape[1:]) != known.shape[1:]
            ):
                return None
        if any(
            keras_internals.calls.get_mask(specs[value_id]) is not None
            for value_id in graph.output_ids
        ):
            return None
        rows = next(x.shape[0] for x in fed if x is not None)

        def spec(value: Value) -> keras.KerasTensor:
            known = specs[value.id]
            return keras.KerasTensor((rows, *known.shape[1:]), known.dtype)

        return keras.tree.map_structure(spec, self.captured.output_structure)

    def nest_outputs(self, outputs: Tensors) -> Any:
        """Returns outputs in the model's structure, with their masks on them."""
        for key, value in outputs.items():
            if key.is_mask:
                keras_internals.calls.set_mask(outputs[TensorKey(key.value_id)], value)
        return keras.tree.map_structure(
            lambda value: outputs.get(TensorKey(value.id)),
            self.captured.output_structure,
        )

    def run(
        self,
        inputs: Mapping[TensorKey, tf.Tensor],
        *,
        schedule: Schedule,
        training: bool | None,
    ) -> StepResult:
        """Runs a mini-batch through all stages, differentiably.

        Where no tape records it, the stages are traced without gradients. In a graph
        one may be asked for even so, by a tape around the function that is traced: it
        then runs the forwards once more.

        Args:
            inputs: The values that are given and the masks on them, `[B, ...]` each.
            schedule: The order of the actions, on the devices numbered as they occur.
            training: Mode in which layers run; None leaves it to each.

        Raises:
            ValueError: If two stages share a variable that one of them changes.
            RuntimeError: If replicas that sum over each other run one after the other.
        """
        evaluates = not functions.may_be_recorded()
        begin = functools.partial(self.begin, schedule=schedule, training=training)
        step = begin(inputs, evaluates=evaluates)
        if evaluates and step.has_side_effects:
            evaluates = tf.executing_eagerly()
            step = step if evaluates else begin(inputs)
        return DifferentiableStep(
            step,
            evaluates=evaluates,
            begin=begin,
            device=self.strategy.primary_devices[-1],
            num_replicas=current_strategy().num_replicas,
        ).run(inputs)

    def begin(
        self,
        inputs: Mapping[TensorKey, tf.Tensor],
        *,
        schedule: Schedule,
        training: bool | None,
        outputs: Collection[int] | None = None,
        per_step: Mapping[TensorKey, tf.TensorSpec] | None = None,
        differentiable: bool = True,
        evaluates: bool = False,
        initial_state: InitialState | None = None,
    ) -> Step:
        """Traces the stages and reads their variables, for one step.

        Args:
            inputs: The values that are given and the masks on them, `[B, ...]` each.
            schedule: The order of the actions, on the devices numbered as they occur.
            training: Mode in which layers run; None leaves it to each.
            outputs: Ids of the values to return. Defaults to those of the model.
            per_step: Inputs that are given whole to every microbatch, later.
            differentiable: True to compute gradients of the inputs.
            evaluates: True if no gradients are wanted at all.
            initial_state: The variables before the step. Defaults to those by now.

        Raises:
            ValueError, RuntimeError: As `run` does.
        """
        per_step, devices = per_step or {}, self.strategy.stage_devices
        num_replicas = self._num_replicas() if training else 1
        first = next(iter(inputs.values()))
        # Replicas sum at each microbatch, so all have as many of them.
        split = microbatch.split_batch(
            first, schedule.num_microbatches, dynamic=num_replicas > 1
        )
        options = self._options(
            split, num_replicas, training=training, evaluates=evaluates
        )
        specs = {**{key: split.spec(x) for key, x in inputs.items()}, **per_step}
        non_differentiable = () if differentiable else {key.value_id for key in specs}
        once = frozenset(key.value_id for key in per_step)
        traced = self._trace(specs, options, split, non_differentiable, once)
        flow = _traced_flow(traced)
        schedule = schedule.first_microbatches(len(split.sizes)).with_flow(flow)
        if evaluates:
            schedule = schedule.without_copies()
        output_ids = self.captured.graph.output_ids
        return Step(
            traced=traced,
            variables=[stage.variables for stage in self.stages],
            devices=devices,
            initial_state=initial_state or read_variables(self.stages, traced, devices),
            schedule=schedule,
            split=split,
            output_ids=frozenset(output_ids if outputs is None else outputs),
            per_step=once,
            are_sums=self._summed_losses(traced, schedule, training=training),
            boundary=Boundary(self.options.codec, output_ids),
            remats=self._remats(traced, schedule, split, evaluates=evaluates),
            start_dependency=functions.clustering_stop() if training else None,
        )

    def _remats(
        self,
        traced: Sequence[TracedStage],
        schedule: Schedule,
        split: microbatch.Split,
        *,
        evaluates: bool,
    ) -> Sequence[Remat]:
        """Returns the rematerialisation policy of each stage, found once a trace."""
        remat, sizes_known = self.options.remat, split.static_size is not None
        if evaluates:
            return [remat] * len(traced)
        key = tuple(map(id, traced)), schedule  # Stages keep what they have traced.
        if key not in self.fitted_remats:
            self.fitted_remats[key] = remat.for_stages(
                len(traced),
                lambda: device_stages(
                    self.stages, traced, schedule, sizes_known=sizes_known
                ),
            )
        return self.fitted_remats[key]

    def _options(
        self,
        split: microbatch.Split,
        num_replicas: int,
        *,
        training: bool | None,
        evaluates: bool,
    ) -> list[StageOptions]:
        """Returns the options of each stage in a step."""
        options = dataclasses.replace(
            self.options,
            training=training,
            evaluates=evaluates,
            num_microbatches=len(split.sizes),
            may_be_empty=split.may_be_empty,
            num_replicas=num_replicas,
        )
        return [options.on(device) for device in self.strategy.primary_devices]

    def _trace(
        self,
        specs: Mapping[TensorKey, tf.TensorSpec],
        options: Sequence[StageOptions],
        split: microbatch.Split,
        non_differentiable: Collection[int],
        per_step: Collection[int],
    ) -> list[TracedStage]:
        try:
            return trace_all(
                self.stages,
                specs,
                options,
                non_differentiable=non_differentiable,
                per_step=per_step,
            )
        except Exception as error:
            if split.static_size is None:
                error.add_note(
                    "In a pipeline layers were called on a microbatch of unknown size: "
                    "the batch size is not known, or num_microbatches does not divide "
                    "it. If a layer works for known sizes alone, use batches of a size "
                    "that num_microbatches divides."
                )
            raise

    def _summed_losses(
        self,
        traced: Sequence[TracedStage],
        schedule: Schedule,
        *,
        training: bool | None,
    ) -> list[list[bool]]:
        """Returns for each stage which of the losses it adds are sums over examples."""
        each = [
            [stage.segment.calls[i] for i in traced_stage.trace.forward.loss_calls]
            for stage, traced_stage in zip(self.stages, traced, strict=True)
        ]
        training = bool(training)
        parts = schedule.num_microbatches * current_strategy().num_replicas
        if parts > 1 and any(each) and training not in self.summed_losses:
            self.summed_losses[training] = layer_probes.summed_losses(
                self.captured,
                [call for calls in each for call in calls],
                self.probed,
                training=training,
                num_microbatches=schedule.num_microbatches,
                warns=self.added_losses == "mini_batch",
            )
        known = self.summed_losses.get(training, IdentityMap())
        results = []
        for calls in each:
            flags = {id(call): iter(known.get(call, ())) for call in calls}
            results.append([next(flags[id(call)], False) for call in calls])
        return results

    def _num_replicas(self) -> int:
        """Returns the number of replicas in the layers' collectives; 1 without any.

        Raises:
            RuntimeError: If replicas run one after the other.
        """
        num_replicas = current_strategy().num_replicas
        called = (layer for stage in self.stages for layer in stage.layers)
        if num_replicas == 1 or not normalization.any_synchronized(called):
            return 1
        if tf.executing_eagerly():
            raise RuntimeError(
                "Layers that synchronize sum over replicas that run at the same time; "
                "eagerly they run one after the other. Received an eager call of a "
                f"pipeline on one of {num_replicas} replicas. Put `strategy.run(...)` "
                "into a `tf.function`."
            )
        return num_replicas


def make_stages(graph: CallGraph, calls_per_stage: Sequence[int]) -> tuple[Stage, ...]:
    """Returns stages of these numbers of calls, which share equal functions."""
    cache = StageCache()
    return tuple(
        Stage(k, graph.segment(span), cache)
        for k, span in enumerate(stage_spans(calls_per_stage))
    )


def _traced_flow(traced: Sequence[TracedStage]) -> DataFlow:
    """Returns the data flow of what is sent: not all outputs need be read."""
    return DataFlow.of_values(
        [stage.input_keys for stage in traced], [stage.output_keys for stage in traced]
    )
