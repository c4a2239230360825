"""A Keras model as a workload, traced layer by layer and never executed.

In a scope without state, weights have shapes and no values, so a model of a billion of
them takes no more memory than its graph. FLOPs, bytes moved and bytes kept are counted
in the traced forward and gradient of each layer, on a few rows, and divided by them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import stage_spans
from tfgpipe.capture import TensorKey, source_model, tracer
from tfgpipe.partition import SegmentProfiler, call_weights, may_start
from tfgpipe.planner.workload import Layer, Workload

# Rows that layers are traced on. What does not grow with them, such as a causal mask,
# is counted with each row, so these are more than one.
ROWS = 4
# Of what a transformer's block keeps, every shard holds so many tensors of its input's
# size: input, two norms, their sum, an output (Korthikanti et al. 2022, section 4.2.1).
WHOLE_TENSORS = 5


@runtime_checkable
class Shardable(Protocol):
    """A layer that can be on several devices: T divides `max_shards`."""

    @property
    def max_shards(self) -> int:
        """Such as the number of heads."""


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Inside, weights of layers that are made have shapes and no values."""
    with keras.StatelessScope(initialize_variables=False):
        yield


def read(
    model: keras.Model | Callable[[], keras.Model], *, name: str | None = None
) -> Workload:
    """Returns what there is to train in a model.

    Example:

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> workload = tfgpipe.planner.read(model)
    >>> workload.parameters, workload.layers[0].forward_flops
    (36.0, 68.0)

    Args:
        model: A Functional or Sequential model; or a function that makes one, which
            then never has weights, so that any size will do.
        name: What to call it. None for the model's name.

    Raises:
        ValueError: If a size other than the batch's is not known.
        TypeError: If it is a model with a `call` of its own.
    """
    with without_weights():
        made = model if isinstance(model, keras.Model) else model()
        given = source_model.make_source(source_model.copy_unbuilt(made))
        if given.inputs is None:
            raise ValueError(
                "A plan needs the shapes of a model's inputs. Received model "
                f"'{made.name}' without any. Begin with a `keras.Input`."
            )
        recorded = given.capture(given.inputs, {})
        layers = _layers(recorded)
    compute = next(
        call.layer.compute_dtype
        for call in reversed(recorded.graph.calls)
        if isinstance(call.layer, keras.layers.Layer)
    )
    return Workload(name=name or made.name, layers=layers, dtype=compute)


def num_slots(
    make: Callable[[], keras.optimizers.Optimizer], model: keras.Model
) -> float:
    """Returns how many numbers an optimizer keeps for each trained weight, on average.

    Moments, sums of gradients and averaged weights, as the optimizer makes them: what
    it factors is less than one. In a graph that nobody runs they take no memory.

    Args:
        make: Makes the optimizer.
        model: What it is to train. Its weights need no values.
    """
    with tf.Graph().as_default():
        weights = [
            keras.Variable("zeros", shape=v.shape, dtype=v.dtype, name=v.name)
            for v in model.trainable_variables
        ]
        optimizer = make()
        optimizer.build(weights)
    slots = [s for x in keras_internals.optimizer_slots(optimizer).values() for s in x]
    trained = sum(math.prod(weight.shape) for weight in weights)
    return sum(math.prod(slot.shape) for slot in slots) / max(trained, 1)


def _layers(recorded: tracer.CapturedModel) -> tuple[Layer, ...]:
    network = recorded.graph
    specs = {
        TensorKey(number): tf.TensorSpec(
            _known(recorded.specs[number]), recorded.specs[number].dtype
        )
        for number in network.input_ids
    }
    traced = SegmentProfiler(network, stage_spans([1] * len(network.calls)), specs)
    sizes, values = traced.value_bytes(), traced.value_specs()
    received = network.received_bytes(sizes)
    flops, moved = traced.flops(), traced.memory_traffic()
    kept, worked = traced.saved_bytes(), traced.workspace_bytes(recomputes=False)
    weights, starts = call_weights(network), may_start(network)
    num_calls = len(network.calls)
    found = []
    for i, call in enumerate(network.calls):
        output = sum(sizes[number] for number in call.output_ids)
        reads = sum(sizes[number] for number in call.input_ids)
        into = received[i][num_calls] if i else reads
        max_shards = call.layer.max_shards if isinstance(call.layer, Shardable) else 1
        whole = WHOLE_TENSORS * reads if max_shards > 1 else 0
        found.append(
            Layer(
                name=call.layer.name,
                parameters=weights[i].parameters,
                trained=sum(weights[i].trainable_bytes) / 4,
                forward_flops=flops[i].forward / ROWS,
                backward_flops=flops[i].backward / ROWS,
                forward_traffic=moved[i].forward / ROWS,
                backward_traffic=moved[i].backward / ROWS,
                kept_bytes=sum(kept[i]) / ROWS,
                work_bytes=max(worked[i] - sum(weights[i].trainable_bytes), 0) / ROWS,
                input_bytes=into / ROWS,
                output_bytes=output / ROWS,
                positions=_positions(values[call.output_ids[0]]),
                max_shards=max_shards,
                whole_bytes=min(whole, sum(kept[i])) / ROWS,
                may_start=starts[i],
            )
        )
    return tuple(found)


def _known(tensor: keras.KerasTensor) -> list[int]:
    """Returns the shape of an input of a few rows."""
    if None in tensor.shape[1:]:
        raise ValueError(
            "A plan depends on all sizes but that of the batch. Received an input "
            f"'{tensor.name}' of shape {tensor.shape}. Make the model for one size."
        )
    return [ROWS, *tensor.shape[1:]]


def _positions(spec: tf.TensorSpec) -> float:
    """Returns the rows of a layer's products for each row of the batch."""
    return float(math.prod(spec.shape[1:-1]))
