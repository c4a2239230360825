"""Losses that layers add and that couple examples, such as those that balance experts.

Such a loss is a product of means over a batch (Shazeer et al. 2017, section 4; Fedus et
al. 2021, equations 4 to 6), and a mean over microbatches of it is not that of the
mini-batch. So the tensors of which those means are taken, a *cut* of the loss's graph
(`tfgpipe.graph.batch_cuts`), are results of the layer in place of the loss. Of all
microbatches together they give the loss of the mini-batch, and its gradient by them:

    sweep 1   forwards ─▶ cut [B, ...] ─▶ loss ─▶ its gradient by the cut, g
    sweep 2   forwards and backwards, where g is added to the gradient of the cut

Where all forwards come before all backwards anyway, as in `PipelinedLayer`, there is
one sweep. All else is as ever: schedules, rematerialisation, compilation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe.capture import Segment, TensorKey, stack_losses
from tfgpipe.devices import small_functions
from tfgpipe.graph import batch_cuts, eager_run
from tfgpipe.runtime import layer_probes
from tfgpipe.runtime.executor import Executor, StepResult
from tfgpipe.runtime.pipeline import Pipeline
from tfgpipe.runtime.probes import FailedProbe, Probe
from tfgpipe.runtime.traced_calls import BATCH, TracedCall, probe_value
from tfgpipe.schedules import Schedule

Tensors = Mapping[TensorKey, tf.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class CoupledLosses:
    """The losses of one kind of layer that couple examples.

    Attributes:
        indices: Indices of these among the losses that the layer adds.
        cuts: Their cut, in graphs of a known batch size and in others.
        function: The function from the cut to the losses.
    """

    indices: tuple[int, ...]
    cuts: tuple[Sequence[batch_cuts.Cut], ...]
    function: Any

    def read(
        self, losses: Sequence[tf.Tensor], rows: int | tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the other losses, and the cut, `[B, ...]` each.

        Args:
            losses: The losses that a call of the layer has added.
            rows: The number of examples, B.

        Raises:
            ValueError: If the layer makes other losses than in its probe.
        """
        coupled = [losses[i] for i in self.indices]
        others = [x for i, x in enumerate(losses) if i not in self.indices]
        for cuts in self.cuts:
            try:
                tensors = [cut.of(coupled) for cut in cuts]
            except LookupError:
                continue
            pairs = zip(tensors, cuts, strict=True)
            return others, [batch_cuts.split_rows(x, cut, rows) for x, cut in pairs]
        raise ValueError(
            "A loss that a layer adds and that couples examples is made by other "
            f"operations for {rows} examples than for {BATCH}. Use batches of a size "
            "that num_microbatches divides, `num_microbatches=1`, or "
            "`added_losses='microbatch'`."
        )

    def evaluate(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the sum of the losses of a cut of the whole mini-batch."""
        pairs = zip(values, self.cuts[0], strict=True)
        losses = self.function([batch_cuts.join_rows(x, cut) for x, cut in pairs])
        return _sum(losses)


class CoupledLayers:
    """A pipeline whose layers return cuts in place of losses that couple examples.

    Args:
        pipeline: The pipeline.
        training: True for layers as in training.

    Attributes:
        pipeline: The pipeline, of which some calls have more results.
        first_name: The name of the first layer that has such a loss, or "".
    """

    def __init__(self, pipeline: Pipeline, *, training: bool) -> None:
        self.pipeline, self.first_name = pipeline, ""
        # By call: its stage's device, its losses, and the keys of its cut.
        self._calls: list[tuple[str, CoupledLosses, list[TensorKey]]] = []
        captured, graph = pipeline.captured, pipeline.captured.graph
        specs, calls = dict(captured.specs), list(graph.calls)
        known: dict[Hashable, CoupledLosses | None] = {}
        devices = [
            device
            for device, stage in zip(
                pipeline.strategy.primary_devices, pipeline.stages, strict=True
            )
            for _ in stage.segment.calls
        ]
        for i, kind, segment, verdict in _coupled_calls(pipeline, training=training):
            given = [specs[number] for number in segment.input_ids]
            if kind not in known:
                known[kind] = _find(segment, given, verdict, training=training)
            coupled = known[kind]
            rows = [n for n in segment.input_ids if specs[n].shape[:1] == (None,)]
            if coupled is None or not rows:
                continue
            new = {
                len(specs) + j: keras.KerasTensor(
                    (None, None, *(n for k, n in enumerate(c.shape) if k != c.axis)),
                    c.dtype.name,
                )
                for j, c in enumerate(coupled.cuts[0])
            }
            specs |= new
            calls[i] = dataclasses.replace(
                calls[i],
                output_ids=(*calls[i].output_ids, *new),
                read_losses=coupled.read,
                batch_id=rows[0],
            )
            self.first_name = self.first_name or verdict.name
            self._calls.append((devices[i], coupled, [TensorKey(n) for n in new]))
        if self._calls:
            graph = dataclasses.replace(
                graph,
                calls=tuple(calls),
                output_ids=(*graph.output_ids, *(k.value_id for k in self.keys)),
            )
            captured = dataclasses.replace(captured, graph=graph, specs=specs)
            self.pipeline = pipeline.of(captured)

    @property
    def keys(self) -> list[TensorKey]:
        """The keys of all cuts; none if no loss of a layer couples examples."""
        return [key for _, _, keys in self._calls for key in keys]

    def loss(self, values: Tensors) -> tf.Tensor:
        """Returns the losses of cuts of the whole mini-batch, added."""
        each = [
            small_functions.call_on(device, coupled.evaluate, [values[k] for k in keys])
            for device, coupled, keys in self._calls
        ]
        last = self.pipeline.strategy.primary_devices[-1]
        return small_functions.call_on(last, _sum, each)

    def gradients(
        self, inputs: Tensors, schedule: Schedule, loss_grad: tf.Tensor
    ) -> tuple[tf.Tensor, dict[TensorKey, tf.Tensor]]:
        """Runs all forwards; returns the losses, added, and gradients of the cuts.

        Args:
            inputs: The inputs of the model, `[B, ...]` each.
            schedule: The order of the actions.
            loss_grad: The gradient of the losses.
        """
        step = self.pipeline.begin(
            inputs,
            schedule=schedule,
            training=True,
            outputs=[key.value_id for key in self.keys],
            differentiable=False,
            evaluates=True,
        )
        values = Executor(step).forward(inputs).outputs
        losses: list[tf.Tensor] = []
        gradients: dict[TensorKey, tf.Tensor] = {}
        for device, coupled, keys in self._calls:
            loss, *made = small_functions.call_on(
                device,
                functools.partial(_with_gradients, coupled.evaluate),
                loss_grad,
                [values[key] for key in keys],
            )
            losses.append(loss)
            floats = [key for key in keys if values[key].dtype.is_floating]
            gradients.update(zip(floats, made, strict=True))
        last = self.pipeline.strategy.primary_devices[-1]
        return small_functions.run_on(last, _sum, losses), gradients

    def run(
        self, inputs: Tensors, *, schedule: Schedule, training: bool | None
    ) -> StepResult:
        """Runs a mini-batch through all stages, as `Pipeline.run` does."""
        return self.with_losses(
            self.pipeline.run(inputs, schedule=schedule, training=training)
        )

    def with_losses(self, result: StepResult) -> StepResult:
        """Returns the result of forwards with the losses of cuts in their place."""
        if not self._calls:
            return result
        keys = self.keys
        loss = add_losses(self.loss(result.outputs), result.loss)
        outputs = {key: x for key, x in result.outputs.items() if key not in keys}
        return dataclasses.replace(result, outputs=outputs, loss=loss)


def coupled_layers(pipeline: Pipeline, *, training: bool | None) -> CoupledLayers:
    """Returns a pipeline in which losses that couple examples are exact."""
    mode = bool(training)
    if mode not in pipeline.coupled:
        pipeline.coupled[mode] = CoupledLayers(pipeline, training=mode)
    found: CoupledLayers = pipeline.coupled[mode]
    return found


def _sum(losses: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of losses, in at least single precision."""
    return tf.reduce_sum(stack_losses(losses))


def add_losses(loss: tf.Tensor, other: tf.Tensor | None) -> tf.Tensor:
    """Returns the sum of two losses, of which the second may be None."""
    return loss if other is None else loss + tf.cast(other, loss.dtype)


def _coupled_calls(
    pipeline: Pipeline, *, training: bool
) -> Iterator[tuple[int, Hashable, Segment, layer_probes.LayerVerdict]]:
    """Yields index, kind and verdict of calls of which a loss couples examples."""
    graph, specs = pipeline.captured.graph, pipeline.captured.specs
    coupled = {
        kind: verdict
        for (kind, mode), verdict in pipeline.probed.items()
        if mode == training
        and isinstance(verdict, layer_probes.LayerVerdict)
        and verdict.coupled_losses
    }
    is_wanted = coupled and pipeline.added_losses == "mini_batch"
    for i, call in enumerate(graph.calls if is_wanted else ()):
        kind = layer_probes.kind_of(call, [specs[n] for n in call.input_ids])
        if kind in coupled:
            yield i, kind, graph.segment(slice(i, i + 1)), coupled[kind]


def _find(
    segment: Segment,
    given: Sequence[keras.KerasTensor],
    verdict: layer_probes.LayerVerdict,
    *,
    training: bool,
) -> CoupledLosses | None:
    """Returns the losses of a kind of layer, or None if they have no cut."""
    trace = functools.partial(TracedCall, segment, given, training=training)
    attempt = functools.partial(
        _cut, trace, verdict.coupled_losses, verdict.unknown_size
    )
    found = Probe(None, verdict.name, attempt).verdict()
    return None if isinstance(found, FailedProbe) else found


def _cut(
    trace: Callable[..., TracedCall], indices: tuple[int, ...], size: int
) -> CoupledLosses:
    """Cuts the losses of a layer, and compares the loss of the cut with the loss.

    Args:
        trace: Function from a batch size and another unknown size to the layer.
        indices: Indices of these among the losses that it adds.
        size: An unknown size that it takes.

    Raises:
        NotImplementedError: If they have no cut.
        ValueError: If the loss of the cut differs.
    """

    def losses(traced: TracedCall) -> list[tf.Tensor]:
        return [traced.losses[i] for i in indices]

    sizes = (None, BATCH, BATCH // 2)
    any_size, whole, half = (trace(batch_size, size) for batch_size in sizes)
    cuts = [batch_cuts.find(losses(any_size), any_size.inputs, None)]
    # Of a known batch size other operations may be between them and the losses.
    with contextlib.suppress(NotImplementedError):
        static = batch_cuts.find(
            losses(whole), whole.inputs, _counterparts(whole, half)
        )
        kinds = [[(c.axis, c.dtype, len(c.shape)) for c in x] for x in (*cuts, static)]
        if kinds[0] == kinds[1]:
            cuts.append(static)
    dynamic = cuts[0]
    free = losses(trace(None, None))
    function = batch_cuts.function_of([cut.of(free) for cut in dynamic], free)

    tensors = [cut.of(losses(any_size)) for cut in dynamic]
    with tf.init_scope():
        inputs, draws = any_size.examples(), eager_run.RandomDraws()
        values = list(map(probe_value, any_size.variables))

        def run(rows: slice, *, last: bool = False) -> list[Any]:
            some = [x[rows] if len(x) == BATCH else x for x in inputs]
            draw, results = draws.for_run(last=last), [*tensors, *losses(any_size)]
            return [x.numpy() for x in any_size.run(results, some, values, draw)]

        of_all = run(slice(None))
        parts = run(slice(BATCH // 2)), run(slice(BATCH // 2, None), last=True)
        joined = [
            np.concatenate((a, b), axis=cut.axis)
            for a, b, cut in zip(*parts, dynamic, strict=False)
        ]
        made = [x.numpy() for x in function([tf.constant(x) for x in joined])]
    same_cut = layer_probes.nearly_equal(joined, of_all[: len(joined)])
    if not same_cut or not np.allclose(made, of_all[len(joined) :], rtol=1e-3, atol=0):
        raise ValueError("the values of an example depend on others")
    return CoupledLosses(indices, tuple(cuts), function)


def _counterparts(a: TracedCall, b: TracedCall) -> dict[tf.Operation, tf.Operation]:
    """Returns for each operation of a graph the same one of another.

    Raises:
        NotImplementedError: If the graphs differ.
    """
    pair = a.graph.get_operations(), b.graph.get_operations()
    if [op.type for op in pair[0]] != [op.type for op in pair[1]]:
        raise NotImplementedError("other operations for other batch sizes")
    return dict(zip(*pair, strict=True))


def _with_gradients(
    evaluate: Any, loss_grad: tf.Tensor, values: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns losses of a cut, and the gradients of its floats."""
    floats = [x for x in values if x.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(floats)
        loss = evaluate(values)
    loss_grad, zero = tf.cast(loss_grad, loss.dtype), tf.UnconnectedGradients.ZERO
    return [loss, *tape.gradient(loss, floats, loss_grad, zero)]
