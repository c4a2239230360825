"""Whether layers treat the examples of a batch independently, as a pipeline assumes.

For microbatches `x1` and `x2` a pipeline returns `f(x1)` followed by `f(x2)` where the
plain model returns `f(x)`. So of each kind of layer one is probed: it is called on a
few examples, on the same with another first one, and on half of them. Of the losses
that layers add a pipeline takes the mean over microbatches, so the loss of a batch must
be the mean of those of its halves.

A probe calls the layers of others on noise, so it may run into anything. It never stops
a model that would train: what it could not find out is a warning.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe.capture import (
    Call,
    Interpreter,
    Segment,
    TensorKey,
    TracingScope,
    layer_variables,
    sum_losses,
    tracer,
)
from tfgpipe.runtime import loss_probes, probe_inputs

# Examples that a layer is probed on, and half of them.
_BATCH, _HALF = 6, 3
# In place of other unknown sizes: layers that work on a sequence in chunks need
# powers of two.
_UNKNOWN_SIZE = 8
# The most weight entries of a layer for which values are made up: 64 MiB.
_MAX_WEIGHTS = 2**24
# A stateful operation that a probe may run, since it has no side effects.
_READ_ONLY_OPS = {"ReadVariableOp"}


def check_batch_independence(
    captured: tracer.CapturedModel, *, num_microbatches: int
) -> None:
    """Refuses layers that change the batch size; warns of those that mix examples.

    Keras' own layers are known to do neither, but for batch normalisation. Of other
    layers one of each kind is probed, in inference: what mixes in training alone
    normalises batches. The shapes that layers declare are not trusted.

    Args:
        captured: The model, on symbolic tensors.
        num_microbatches: M. With one microbatch examples may mix.

    Raises:
        ValueError: If a layer's output has another batch size than its input, or an
            output of the model has the batch size as another axis as well.
    """
    unknown: list[loss_probes.FailedProbe] = []

    def keeps_examples_apart(call: Call) -> bool:
        ids = (*call.input_ids, *call.output_ids)
        declared = {captured.specs[number].shape[:1] for number in ids}
        return _is_of_keras(call.layer) and len(declared) == 1

    for name, segment, inputs in _layers_to_probe(captured, keeps_examples_apart):
        traced = _trace_probes(name, segment, inputs)
        if isinstance(traced, loss_probes.FailedProbe):
            unknown.append(traced)
            continue
        is_constant = traced[0].broadcasts
        outputs = set(segment.calls[0].output_ids)
        if is_constant and not outputs.isdisjoint(captured.graph.output_ids):
            raise _other_batch_size(name, traced[0])
        if num_microbatches == 1 and not is_constant:
            continue
        mixes: bool | loss_probes.FailedProbe = _repeats_batch_size(*traced)
        if mixes:
            _check_outputs(name, captured)
        elif is_constant or traced[0].num_weights <= _MAX_WEIGHTS:
            mixes = loss_probes.run_probe(
                name, functools.partial(_mixes_examples, *traced)
            )
        if is_constant and mixes is True:
            raise _other_batch_size(name, traced[0])
        if isinstance(mixes, loss_probes.FailedProbe):
            unknown.append(mixes)
        elif mixes:
            warnings.warn(
                f"Layer '{name}' mixes the examples of a batch, and in a pipeline it "
                "sees one microbatch at a time: its results differ from those of the "
                "unpipelined model. Keep it outside the pipeline, or use "
                "`num_microbatches=1`.",
                stacklevel=2,
            )
    if num_microbatches > 1:
        loss_probes.warn_of_failures(
            unknown,
            "Whether each layer treats the examples of a batch independently",
            "If it does not, its results differ from those of the unpipelined model: "
            "compare them, or use `num_microbatches=1`.",
        )


def check_added_losses(
    captured: tracer.CapturedModel, *, num_microbatches: int
) -> None:
    """Warns of losses that layers add and that are no means over the batch.

    One layer of each kind is probed, in training.

    Args:
        captured: The model, on symbolic tensors.
        num_microbatches: M. With one microbatch any loss is exact.
    """
    if num_microbatches == 1:
        return
    unknown: list[loss_probes.FailedProbe] = []

    def adds_none(call: Call) -> bool:
        inner = keras_internals.inner_layers(call.layer)
        return _is_of_keras(call.layer) and not any(
            layer.activity_regularizer for layer in inner
        )

    for name, segment, inputs in _layers_to_probe(captured, adds_none):
        is_mean = loss_probes.run_probe(
            name, functools.partial(_adds_mean_loss, segment, inputs)
        )
        if isinstance(is_mean, loss_probes.FailedProbe):
            unknown.append(is_mean)
        elif not is_mean:
            warnings.warn(
                f"Layer '{name}' adds a loss that is no mean over the examples of a "
                "batch, and a pipeline takes the mean of those of the microbatches. "
                f"Received num_microbatches={num_microbatches}: training differs from "
                "that of the unpipelined model. Divide a sum by the batch size; of a "
                "product of means, as for the balance of experts, fewer microbatches "
                "are closer, and `num_microbatches=1` is exact.",
                stacklevel=2,
            )
    loss_probes.warn_of_failures(
        unknown,
        "Whether each loss that a layer adds is a mean over the examples of a batch",
        "If it is not, training differs from that of the unpipelined model: compare "
        "them, or use `num_microbatches=1`.",
    )


def _layers_to_probe(
    captured: tracer.CapturedModel, is_known: Callable[[Call], bool]
) -> Iterator[tuple[str, Segment, list[keras.KerasTensor]]]:
    """Yields name, call and inputs of one layer of each kind that is not known."""
    seen: set[Hashable] = set()
    for position, call in enumerate(captured.graph.calls):
        inputs = [captured.specs[number] for number in call.input_ids]
        if is_known(call) or (kind := _layer_kind(call.layer, inputs)) in seen:
            continue
        seen.add(kind)
        segment = captured.graph.segment(slice(position, position + 1))
        yield call.layer.name, segment, inputs


class _ProbeCall:
    """A call of a layer, without its gradient, on a known number of examples.

    Args:
        segment: The call.
        given: Its inputs.
        batch_size: The number of examples.
        training: Whether the layer is in training.

    Attributes:
        variables: Those of the layer.
        input_shapes: The shapes of its inputs.
        output_shapes: Those of its outputs.
        is_random: Whether it changes its variables, as drawing at random does.
        adds_loss: Whether it adds a loss.
    """

    def __init__(
        self,
        segment: Segment,
        given: Sequence[keras.KerasTensor],
        batch_size: int,
        *,
        training: bool,
    ) -> None:
        keys = [TensorKey(number) for number in segment.input_ids]
        interpreter = Interpreter(segment, keys, training=training, remat=False)
        self.variables = [v for some in layer_variables(segment.layers) for v in some]
        drawn: list[bool] = []

        def forward(inputs: Any, values: Any) -> tuple[list[tf.Tensor], Any]:
            with TracingScope(zip(self.variables, values, strict=True), None) as scope:
                made = interpreter.run(inputs)
            outputs = [x for x in made.values() if x is not None]
            after = [scope.get_current_value(v) for v in self.variables]
            drawn.append(any(a is not b for a, b in zip(values, after, strict=True)))
            return outputs, sum_losses(scope.losses)

        self._inputs = [_spec(x, batch_size) for x in given]
        values = [tf.TensorSpec(v.shape, v.dtype) for v in self.variables]
        with tf.init_scope(), tf.device(None):
            traced = tf.function(forward, autograph=False)
            self._concrete = traced.get_concrete_function(self._inputs, values)
        outputs, loss = self._concrete.structured_outputs
        self.is_random = any(drawn)
        self.input_shapes = [spec.shape for spec in self._inputs]
        self.output_shapes = [output.shape for output in outputs]
        self.adds_loss = loss is not None

    @property
    def broadcasts(self) -> bool:
        """Whether an output is of one example, to be broadcast to any batch."""
        return any(x.rank and x[0] == 1 for x in self.output_shapes)

    @property
    def changes_batch_size(self) -> bool:
        """Whether the first axis of an output is neither the batch size nor 1."""
        sizes = (None, 1, self.input_shapes[0][0])
        known = [x for x in self.output_shapes if x.rank is not None]
        return any(x.rank == 0 or x[0] not in sizes for x in known)

    @property
    def num_weights(self) -> int:
        """The number of entries in its variables."""
        return sum(math.prod(v.shape) for v in self.variables)

    def inputs(self) -> list[tf.Tensor]:
        """Returns noise, and of integers and booleans 0 and 1 in turns."""
        operations = self._concrete.graph.get_operations()
        effects = {
            op.type for op in operations if op.op_def.is_stateful
        } - _READ_ONLY_OPS
        if effects:
            raise NotImplementedError(f"effects of {', '.join(sorted(effects))}")
        return [_probe_batch(spec) for spec in self._inputs]

    def values(self) -> list[tf.Tensor]:
        """Returns random values of the variables, weights other than their own.

        Where weights start small or at zero, as those that choose experts do, their
        layer hardly depends on its inputs yet.
        """
        return [
            probe_inputs.example_value(v)
            if v.trainable
            else probe_inputs.example_variable_value(v)
            for v in self.variables
        ]

    def __call__(
        self, inputs: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
    ) -> tuple[list[np.ndarray], np.ndarray | None]:
        """Returns the outputs, and the sum of the losses that the layer adds."""
        outputs, loss = self._concrete(list(inputs), list(values))
        return [x.numpy() for x in outputs], None if loss is None else loss.numpy()


def _trace_probes(
    name: str, segment: Segment, given: Sequence[keras.KerasTensor]
) -> tuple[_ProbeCall, _ProbeCall] | loss_probes.FailedProbe:
    """Returns a call in inference, on the examples of a probe and on half of them.

    Raises:
        ValueError: If an output has another batch size.
    """
    found = []
    for batch_size in (_BATCH, _HALF):
        forward = loss_probes.run_probe(
            name,
            functools.partial(_ProbeCall, segment, given, batch_size, training=False),
        )
        if isinstance(forward, loss_probes.FailedProbe):
            return forward
        if forward.changes_batch_size:
            raise _other_batch_size(name, forward)
        found.append(forward)
    return found[0], found[1]


def _mixes_examples(whole: _ProbeCall, half: _ProbeCall) -> bool:
    """Returns whether the results for an example depend on the others in its batch."""

    def unchanged(outputs: list[np.ndarray]) -> list[np.ndarray]:
        return [x[1:] if len(x) == _BATCH else x for x in outputs]

    with tf.init_scope():
        inputs, values = whole.inputs(), whole.values()
        others = [tf.concat([_different_example(x[:1]), x[1:]], axis=0) for x in inputs]
        made, _ = whole(inputs, values)
        made_of_others, _ = whole(others, values)
        if not _nearly_equal(unchanged(made), unchanged(made_of_others)):
            return True
        if whole.is_random:  # Shapes of random draws differ, and so do their values.
            return False
        made_of_half, _ = half([x[:_HALF] for x in inputs], values)
        return not _nearly_equal([x[:_HALF] for x in made], made_of_half)


def _adds_mean_loss(segment: Segment, given: Sequence[keras.KerasTensor]) -> bool:
    """Returns whether the loss that a layer adds, if any, is a mean over examples."""
    whole, half = (
        _ProbeCall(segment, given, n, training=True) for n in (_BATCH, _HALF)
    )
    if not whole.adds_loss:
        return True
    if whole.num_weights > _MAX_WEIGHTS:
        raise NotImplementedError(f"as many as {whole.num_weights:,} weights")
    with tf.init_scope():
        inputs, values = whole.inputs(), whole.values()
        loss: Any = whole(inputs, values)[1]
        if whole.is_random:
            # Seeds are integers.
            again = [x + 1 if x.dtype.is_integer else x for x in values]
            if not _nearly_equal([loss], [whole(inputs, again)[1]]):
                raise NotImplementedError("a loss of random numbers")
        halves = [x[:_HALF] for x in inputs], [x[_HALF:] for x in inputs]
        mean = np.mean([half(some, values)[1] for some in halves])
    tolerance = 1e-2 if "16" in segment.layers[0].compute_dtype else 1e-4
    return bool(np.isclose(loss, mean, rtol=tolerance, atol=0.0, equal_nan=True))


def _other_batch_size(name: str, forward: _ProbeCall) -> ValueError:
    """Returns the error for a layer of which an output has another batch size."""
    return ValueError(
        "Every layer in a pipeline must keep the batch dimension, since it sees only "
        f"one microbatch at a time. Layer '{name}' maps shape "
        f"{tuple(forward.input_shapes[0])} to "
        f"{', '.join(str(tuple(x)) for x in forward.output_shapes)}. Keep the layer "
        "outside the pipeline."
    )


def _check_outputs(name: str, captured: tracer.CapturedModel) -> None:
    """Raises ValueError if an axis but the first of an output is the batch size."""
    graph = captured.graph
    segment = Segment(graph.calls, graph.input_ids, graph.output_ids)
    inputs = [captured.specs[number] for number in graph.input_ids]
    traced = loss_probes.run_probe(name, lambda: _trace_probes(name, segment, inputs))
    if isinstance(traced, loss_probes.FailedProbe):
        return  # The layer is named in a warning.
    if _repeats_batch_size(*traced):
        shapes = ", ".join(str(tuple(x)) for x in traced[0].output_shapes)
        raise ValueError(
            "Outputs of microbatches are put together along the first axis. Layer "
            f"'{name}' makes another axis as long as the batch, which gives outputs "
            f"of the model a wrong shape. Received outputs of shapes {shapes} of a "
            f"mini-batch of {_BATCH}. Keep the layer outside the pipeline, or use "
            "`num_microbatches=1`."
        )


def _repeats_batch_size(whole: _ProbeCall, half: _ProbeCall) -> bool:
    """Returns whether an axis but the first changes with the batch size."""
    return any(
        a.rank is not None and a.rank == b.rank and not a[1:].is_compatible_with(b[1:])
        for a, b in zip(whole.output_shapes, half.output_shapes, strict=True)
    )


def _is_of_keras(layer: Any) -> bool:
    """Returns whether Keras' documentation says what a layer does with a batch."""
    may_hold_anything = isinstance(layer, keras.layers.Lambda | keras.Model)
    is_layer = isinstance(layer, keras.layers.Layer) and not may_hold_anything
    return is_layer and type(layer).__module__.startswith("keras.")


def _layer_kind(layer: Any, given: Sequence[keras.KerasTensor]) -> Hashable:
    """Returns what layers that treat examples alike have in common."""
    if not isinstance(layer, keras.layers.Layer):
        return id(layer)  # An operation, such as a mean over any axis.
    if isinstance(layer, keras.layers.Lambda | keras.Model):
        return id(layer)  # May hold anything.
    try:
        config = {**layer.get_config(), "name": None}
    except NotImplementedError:  # Made of what no configuration can say.
        return id(layer)
    except Exception:  # It is wrong, which is no reason not to train.
        config = {}
    shapes = tuple((x.shape[1:], x.dtype) for x in given)
    return (type(layer), shapes, repr(config))


def _spec(given: keras.KerasTensor, batch_size: int) -> tf.TensorSpec:
    """Returns a shape of which all sizes are known."""
    sizes = [_UNKNOWN_SIZE if n is None else n for n in given.shape[1:]]
    return tf.TensorSpec([batch_size, *sizes], given.dtype)


def _probe_batch(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns examples of which none has what its neighbours have."""
    noise = probe_inputs.example_tensor(spec, unknown_size=_UNKNOWN_SIZE)
    if spec.dtype.is_floating:
        return noise
    number = tf.reshape(tf.range(_BATCH) % 2, [-1, *[1] * (noise.shape.rank - 1)])
    return tf.cast(tf.broadcast_to(number, tf.shape(noise)), spec.dtype)


def _different_example(example: tf.Tensor) -> tf.Tensor:
    """Returns another example of the same type."""
    if example.dtype.is_bool:
        return tf.logical_not(example)
    return 5 * example + 1 if example.dtype.is_floating else example + 1


def _nearly_equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Returns whether arrays have the same shapes and nearly the same values."""
    return all(
        np.shape(a) == np.shape(b)
        and np.allclose(a, b, rtol=1e-2, atol=1e-2, equal_nan=True)
        for a, b in zip(some, others, strict=True)
    )
