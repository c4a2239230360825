"""Probes of layers: do they treat examples independently, as a pipeline assumes?

For microbatches `x1` and `x2` a pipeline returns `f(x1)` followed by `f(x2)` where the
plain model returns `f(x)`. So of each kind of layer one is probed, in training and in
inference: it is traced once, and run on a few examples, on half of them, and on all
with the first half changed. Random draws are the same each time. Batch normalization,
of which users are told anyway, takes its moving averages. Of a loss that a layer adds a
pipeline takes the mean over microbatches, or the sum, whichever makes the loss of a
batch from those of its halves.

A probe calls the layers of others on noise, so it may run into anything. It never stops
a model that would train: what it could not find out is a warning.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import IdentityMap
from tfgpipe.capture import (
    Call,
    Segment,
    Value,
    tracer,
)
from tfgpipe.graph import eager_run
from tfgpipe.runtime.probes import FailedProbe, Probe, verdicts
from tfgpipe.runtime.traced_calls import (
    BATCH,
    UNKNOWN_SIZE,
    TracedCall,
    probe_value,
    variables_of,
)

# Half of the examples that a layer is probed on.
_HALF = BATCH // 2
# The largest size of a weight that is tried in place of an unknown one.
_MOST_SIZE = 1024
# Layers of Keras that mix examples, or hold anything.
_UNKNOWN_LAYERS = (
    keras.Model,
    keras.layers.CutMix,
    keras.layers.Lambda,
    keras.layers.MixUp,
)


@dataclasses.dataclass(frozen=True)
class AddedLoss:
    """A loss that a layer adds.

    Attributes:
        has_batch_axis: True if an axis is as long as the batch, or unknown.
        is_mean: True for a mean over examples, or a loss that depends on none.
        is_sum: True for a sum over examples.
    """

    has_batch_axis: bool
    is_mean: bool
    is_sum: bool

    @property
    def is_summed(self) -> bool:
        """True if a pipeline takes the sum over microbatches, else the mean."""
        if self.is_sum != self.is_mean:
            return self.is_sum
        return self.has_batch_axis  # Keras takes the sum of its values.


@dataclasses.dataclass(frozen=True)
class LayerVerdict:
    """The verdict of a layer's probe.

    Attributes:
        name: The layer's name.
        mixes: True if results for an example depend on others in its batch.
        losses: The losses that it adds.
        input_shape: The shape of its first input in the probe.
        output_shapes: The shapes of its outputs.
        output_shapes_of_half: Shapes for half of the examples.
        unknown_size: The size in place of those that are not known.
    """

    name: str
    mixes: bool
    losses: tuple[AddedLoss, ...]
    input_shape: tuple[int, ...]
    output_shapes: list[tuple[int, ...]]
    output_shapes_of_half: list[tuple[int, ...]]
    unknown_size: int

    @property
    def coupled_losses(self) -> tuple[int, ...]:
        """Indices of the losses that are neither means nor sums over examples."""
        each = enumerate(self.losses)
        return tuple(i for i, loss in each if not (loss.is_mean or loss.is_sum))

    @property
    def broadcasts(self) -> bool:
        """True if an output is of one example, to be broadcast to any batch."""
        return any(shape[:1] == (1,) for shape in self.output_shapes)

    @property
    def changes_batch_size(self) -> bool:
        """True if the first axis of an output is neither the batch size nor 1."""
        return any(x[:1] not in ((1,), (BATCH,)) for x in self.output_shapes)

    @property
    def repeats_batch_size(self) -> bool:
        """True if an axis but the first changes with the batch size."""
        both = zip(self.output_shapes, self.output_shapes_of_half, strict=True)
        return any(a[1:] != b[1:] for a, b in both)


Found = LayerVerdict | FailedProbe
# The kind of a layer, and whether it was probed in training.
Probed = tuple[Hashable, bool]


def check_batch_independence(
    captured: tracer.CapturedModel, *, num_microbatches: int
) -> dict[Probed, Found]:
    """Refuses layers that change the batch size; warns of those that mix examples.

    Keras' own layers are known to do neither, but for a few. Of other layers one of
    each kind is probed. The shapes that layers declare are not trusted.

    Args:
        captured: The model, on symbolic tensors.
        num_microbatches: M. With one microbatch examples may mix, and none is probed if
            the outputs of the model keep the batch size.

    Returns:
        What was found out about each kind of layer in each mode, for `summed_losses`.

    Raises:
        ValueError: If a layer's output has another batch size than its input, or an
            output of the model has the batch size as another axis as well.
    """
    found: dict[Probed, Found] = {}
    if num_microbatches == 1 and _keeps_size(
        captured, [*captured.graph.input_ids, *captured.graph.output_ids]
    ):
        return found
    mixing: dict[str, list[str]] = {}
    for (kind, training, segment), verdict in verdicts(
        (
            Probe(
                (kind, training, segment),
                _name(segment),
                functools.partial(_probe, segment, inputs, training=training),
            )
            for kind, segment, inputs in _layers_to_probe(captured)
            for training in (True, False)
        ),
        "Whether each layer treats the examples of a batch independently"
        if num_microbatches > 1
        else "",
        "If it does not, its results differ from those of the unpipelined model: "
        "compare them, or use `num_microbatches=1`.",
    ):
        found[kind, training] = verdict
        if isinstance(verdict, FailedProbe):
            continue
        _check_sizes(verdict, captured, segment, num_microbatches)
        if verdict.mixes and num_microbatches > 1:
            modes = mixing.setdefault(verdict.name, [])
            modes.append("training" if training else "inference")
    for name, modes in mixing.items():
        when = f" in {modes[0]}" if len(modes) == 1 else ""
        warnings.warn(
            f"Layer '{name}' mixes the examples of a batch{when}, and in a pipeline it "
            "sees one microbatch at a time: its results differ from those of the "
            "unpipelined model. Keep it outside the pipeline, or use "
            "`num_microbatches=1`.",
            stacklevel=2,
        )
    return found


def _check_sizes(
    verdict: LayerVerdict,
    captured: tracer.CapturedModel,
    segment: Segment,
    num_microbatches: int,
) -> None:
    """Raises ValueError if a layer or the model returns another batch size."""
    outputs = set(segment.calls[0].output_ids)
    is_output = not outputs.isdisjoint(captured.graph.output_ids)
    must_keep = is_output or verdict.mixes or num_microbatches == 1
    if verdict.changes_batch_size or (verdict.broadcasts and must_keep):
        raise ValueError(
            "Every layer in a pipeline must keep the batch dimension, since it sees "
            f"only one microbatch at a time. Layer '{verdict.name}' maps shape "
            f"{verdict.input_shape} to {', '.join(map(str, verdict.output_shapes))}. "
            "Write it so that the first axis stays, keep it outside the pipeline, or "
            "use `num_microbatches=1`, if the outputs of the model keep the batch."
        )
    if verdict.repeats_batch_size and num_microbatches > 1:
        _check_outputs(verdict.name, captured)


def summed_losses(
    captured: tracer.CapturedModel,
    calls: Collection[Call],
    known: Mapping[Probed, Found],
    *,
    training: bool,
    num_microbatches: int,
    warns: bool,
) -> IdentityMap[Call, tuple[bool, ...]]:
    """Returns for each loss that a call adds whether it is a sum over examples.

    Others are means over examples, or depend on none. Warns of those that are neither.
    Losses of which a call returns a cut are left out.

    Args:
        captured: The model, on symbolic tensors.
        calls: The calls that add losses.
        known: Results of `check_batch_independence`. Other kinds are probed now.
        training: True to run layers as in training.
        num_microbatches: M.
        warns: True to warn of losses that are neither means nor sums.
    """
    adding = IdentityMap((call, None) for call in calls)
    kinds: IdentityMap[Call, Hashable] = IdentityMap()
    probes: dict[Hashable, Probe[Any, LayerVerdict | tuple[bool, ...]]] = {}
    exact: set[Hashable] = set()  # Kinds whose coupled losses are taken of a cut.
    for position, call in enumerate(captured.graph.calls):
        if call in adding:
            inputs = [captured.specs[number] for number in call.input_ids]
            kinds[call] = kind = kind_of(call, inputs)
            segment = captured.graph.segment(slice(position, position + 1))
            given = known.get((kind, training))
            try_it = functools.partial(
                _probe_losses, segment, inputs, given, training=training
            )
            probes.setdefault(kind, Probe((kind, segment), call.layer.name, try_it))
            if call.read_losses is not None:
                exact.add(kind)
    flags: dict[Hashable, tuple[bool, ...]] = {}
    for (kind, segment), verdict in verdicts(
        probes.values(),
        "Whether each loss that a layer adds is a mean over the examples of a batch",
        "It is taken for one: if it is not, training differs from that of the "
        "unpipelined model. Add a sum as one value for each example, compare them, or "
        "use `num_microbatches=1`.",
    ):
        if isinstance(verdict, FailedProbe):
            inputs = [captured.specs[number] for number in segment.input_ids]
            flags[kind] = _trace_losses(segment, inputs, training=training)
        elif isinstance(verdict, LayerVerdict):
            cut = verdict.coupled_losses if kind in exact else ()
            flags[kind] = tuple(
                loss.is_summed for i, loss in enumerate(verdict.losses) if i not in cut
            )
            if warns and kind not in exact:
                _warn_of_losses(verdict, num_microbatches)
        else:
            flags[kind] = verdict
    return IdentityMap((call, flags[kind]) for call, kind in kinds.items())


def _probe_losses(
    segment: Segment,
    given: Sequence[keras.KerasTensor],
    known: Found | None,
    *,
    training: bool,
) -> Found | tuple[bool, ...]:
    """Returns the verdict on a layer, or which of its losses have a batch axis.

    If it cannot be run, losses that all have one are known to be sums.
    """
    verdict = known or _probe(segment, given, training=training)
    if isinstance(verdict, FailedProbe):
        shapes = _trace_losses(segment, given, training=training)
        return shapes if shapes and all(shapes) else verdict
    return verdict


def _warn_of_losses(verdict: LayerVerdict, num_microbatches: int) -> None:
    """Warns of losses that are neither means nor sums over examples."""
    for i in verdict.coupled_losses:
        warnings.warn(
            f"Layer '{verdict.name}' adds a loss that is no mean or sum over the "
            "examples of a batch, and it could not be traced back to values for each "
            "example: a pipeline takes the "
            f"{'sum' if verdict.losses[i].is_summed else 'mean'} of those of the "
            f"microbatches. Received num_microbatches={num_microbatches}: the loss "
            "differs from that of the unpipelined model, and so does training. Of a "
            "product of means, as for the balance of experts, fewer microbatches are "
            "closer, and `num_microbatches=1` is exact.",
            stacklevel=3,
        )


def _keeps_size(captured: tracer.CapturedModel, ids: Sequence[int]) -> bool:
    """Returns whether values are declared to have one batch size."""
    return len({captured.specs[number].shape[:1] for number in ids}) == 1


def _layers_to_probe(
    captured: tracer.CapturedModel,
) -> Iterator[tuple[Hashable, Segment, list[keras.KerasTensor]]]:
    """Yields kind, call and inputs of one layer of each kind that is not known."""
    seen: set[Hashable] = set()
    for position, call in enumerate(captured.graph.calls):
        inputs = [captured.specs[number] for number in call.input_ids]
        keeps_size = _keeps_size(captured, [*call.input_ids, *call.output_ids])
        if keeps_size and _is_known(call, inputs):
            continue
        kind = kind_of(call, inputs)
        if kind not in seen:
            seen.add(kind)
            segment = captured.graph.segment(slice(position, position + 1))
            yield kind, segment, inputs


def _is_known(call: Call, inputs: Sequence[keras.KerasTensor]) -> bool:
    """Returns whether Keras' documentation says what a layer does with a batch."""
    inner = keras_internals.layers.inner_layers(call.layer)
    own = vars(call.layer)
    axes = [a for a in np.ravel(own.get("axis")) if isinstance(a, int | np.integer)]
    ranks = {len(x.shape) for x in inputs}
    return bool(inner) and not (
        any(not type(layer).__module__.startswith("keras.") for layer in inner)
        or any(isinstance(layer, _UNKNOWN_LAYERS) for layer in inner)
        or any(layer.activity_regularizer for layer in inner)
        or any(axis in (0, -rank) for axis in axes for rank in ranks)
    )


def kind_of(call: Call, given: Sequence[keras.KerasTensor]) -> Hashable:
    """Returns a key that is equal for layers that treat examples alike."""
    arguments = keras.tree.map_structure(
        lambda leaf: "tensor" if isinstance(leaf, Value) else leaf,
        (call.args, dict(call.kwargs)),
    )
    shapes = tuple((x.shape[1:], x.dtype) for x in given)
    return (_class_and_config(call.layer), shapes, repr(arguments))


def _class_and_config(layer: Any) -> Hashable:
    if isinstance(layer, keras.layers.Lambda | keras.Model):
        return id(layer)  # May hold anything.
    try:
        with warnings.catch_warnings():  # Of lambdas, which nobody saves here.
            warnings.simplefilter("ignore")
            return (type(layer), repr({**layer.get_config(), "name": None}))
    except NotImplementedError:  # Made of what no configuration can say.
        return id(layer)
    except Exception:  # It is wrong, which is no reason not to train.
        return (type(layer),)


def _probe(
    segment: Segment, given: Sequence[keras.KerasTensor], *, training: bool
) -> Found:
    """Returns the verdict on a layer.

    It is traced for any number of examples if it can be, and with an unknown size that
    it takes.
    """
    sizes = [UNKNOWN_SIZE]
    if any(None in x.shape[1:] for x in given):
        own = {n for v in variables_of(segment) for n in v.shape}
        sizes += sorted(n for n in own if n <= _MOST_SIZE)
    batches: list[list[int | None]] = [[None], [BATCH, _HALF]]
    failures = []
    for size, batch_sizes in itertools.product(sizes, batches):
        traces = [(n, size) for n in batch_sizes]
        attempt = functools.partial(_try, segment, given, traces, training=training)
        found = Probe(None, _name(segment), attempt).verdict()
        if isinstance(found, LayerVerdict):
            return found
        failures.append(found)
    return failures[0]


def _try(
    segment: Segment,
    given: Sequence[keras.KerasTensor],
    sizes: Sequence[tuple[int | None, int]],
    *,
    training: bool,
) -> LayerVerdict:
    """Traces and runs a layer, and returns what that tells."""
    traced = [TracedCall(segment, given, *each, training=training) for each in sizes]
    whole, half = traced[0], traced[-1]
    draws = eager_run.RandomDraws()
    with tf.init_scope():
        inputs, values = whole.examples(), list(map(probe_value, whole.variables))
        outputs, losses = whole(inputs, values, draws.for_run())
        verdict = LayerVerdict(
            _name(segment),
            mixes=False,
            losses=(),
            input_shape=tuple(inputs[0].shape),
            output_shapes=[x.shape for x in outputs],
            output_shapes_of_half=[],
            unknown_size=sizes[0][1],
        )
        if verdict.changes_batch_size:
            return verdict

        def part(some: Sequence[Any], rows: slice) -> list[Any]:
            return [x[rows] if len(x) == BATCH else x for x in some]

        first, last = slice(_HALF), slice(_HALF, None)
        of_half, of_first = half(part(inputs, first), values, draws.for_run())
        mixes = not nearly_equal(part(outputs, first), of_half)
        for scale in (5, -5):
            changed = [
                tf.concat([_different_examples(x[first], scale), x[last]], axis=0)
                for x in inputs
            ]
            of_changed, _ = whole(changed, values, draws.for_run())
            mixes |= not nearly_equal(part(outputs, last), part(of_changed, last))
        total = of_first
        if len(losses):
            rest = part(inputs, last)
            total = of_first + half(rest, values, draws.for_run(last=True))[1]
        owners = [x for x in segment.layers if isinstance(x, keras.layers.Layer)]
        is_exact = not any("16" in layer.compute_dtype for layer in owners)
        close: Any = functools.partial(
            np.isclose, rtol=1e-4 if is_exact else 1e-2, atol=0.0, equal_nan=True
        )
        kinds = zip(
            _have_batch_axis(whole, half),
            close(losses, total / 2).tolist(),
            close(losses, total).tolist(),
            strict=True,
        )
    return dataclasses.replace(
        verdict,
        mixes=mixes,
        losses=tuple(AddedLoss(*each) for each in kinds),
        output_shapes_of_half=[x.shape for x in of_half],
    )


def _have_batch_axis(whole: TracedCall, half: TracedCall) -> list[bool]:
    """Returns for each loss True if an axis is as long as the batch, or unknown."""
    shapes = ([loss.shape for loss in each.losses] for each in (whole, half))
    return [
        a != b or bool(a.rank and not a.is_fully_defined())
        for a, b in zip(*shapes, strict=True)
    ]


def _trace_losses(
    segment: Segment, given: Sequence[keras.KerasTensor], *, training: bool
) -> tuple[bool, ...]:
    """Returns for each loss True if it has a batch axis; the layer cannot be run."""

    def shapes() -> list[bool]:
        trace = functools.partial(TracedCall, segment, given, training=training)
        sizes = ((BATCH, UNKNOWN_SIZE), (_HALF, UNKNOWN_SIZE))
        return _have_batch_axis(*(trace(*each) for each in sizes))

    found = Probe(None, _name(segment), shapes).verdict()
    return () if isinstance(found, FailedProbe) else tuple(found)


def _check_outputs(name: str, captured: tracer.CapturedModel) -> None:
    """Raises ValueError if an axis but the first of an output is the batch size."""
    graph = captured.graph
    segment = Segment(graph.calls, graph.input_ids, graph.output_ids)
    inputs = [captured.specs[number] for number in graph.input_ids]
    verdict = _probe(segment, inputs, training=True)
    if isinstance(verdict, FailedProbe):
        return  # The layer is named in a warning.
    if verdict.repeats_batch_size:
        shapes = ", ".join(map(str, verdict.output_shapes))
        raise ValueError(
            "Outputs of microbatches are put together along the first axis. Layer "
            f"'{name}' makes another axis as long as the batch, which gives outputs "
            f"of the model a wrong shape. Received outputs of shapes {shapes} of a "
            f"mini-batch of {BATCH}. Keep the layer outside the pipeline, or use "
            "`num_microbatches=1`."
        )


def _name(segment: Segment) -> str:
    """Returns the name of the layer, the first of several."""
    return str(segment.calls[0].layer.name)


def _different_examples(examples: tf.Tensor, scale: int) -> tf.Tensor:
    """Returns other examples of the same type."""
    if examples.dtype.is_bool:
        return tf.logical_not(examples)
    if examples.dtype == tf.string:
        return tf.strings.join([examples, examples])
    if examples.dtype.is_floating:
        return scale * examples + scale / abs(scale)
    return examples + 1


def nearly_equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Returns whether arrays have the same shapes and nearly the same values."""
    return all(
        np.shape(a) == np.shape(b)
        and (
            np.array_equal(a, b)
            if a.dtype == object
            else np.allclose(a, b, rtol=1e-2, atol=1e-2, equal_nan=True)
        )
        for a, b in zip(some, others, strict=True)
    )
