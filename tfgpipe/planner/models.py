"""A Keras model as a workload, traced layer by layer and never executed.

In a scope without state, weights have shapes and no values, so a model of a billion of
them takes no more memory than its graph. FLOPs, memory traffic and saved tensors are
counted in the traced forward and gradient of each layer, for a few examples, and
divided by their number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import keras
import tensorflow as tf

from tfgpipe._compat import keras_internals
from tfgpipe._util import stage_spans
from tfgpipe.capture import TensorKey, source_model, tracer
from tfgpipe.costs import LayerCost, SegmentProfiler, dtype_bytes, profiler
from tfgpipe.planner.shard_axes import MOST_PARTS
from tfgpipe.planner.workload import Workload
from tfgpipe.remat import Remat, RematLike, find

# Examples that layers are traced on. What does not grow with them, such as a causal
# mask, is counted with each, so these are more than one.
EXAMPLES = 4
# Of the tensors that a transformer's block saves, each shard has so many of the input's
# size: input, two norms, their sum, an output (Korthikanti et al. 2022, section 4.2.1).
WHOLE_TENSORS = 5


@runtime_checkable
class Shardable(Protocol):
    """A layer that can be on several devices: T divides `max_shards`."""

    @property
    def max_shards(self) -> int:
        """Such as the number of heads."""


@runtime_checkable
class InParts(Protocol):
    """A layer that can have parts of a sequence on several devices.

    Attributes:
        compute_dtype: Dtype of what they exchange.
    """

    compute_dtype: str

    @property
    def key_value_size(self) -> int:
        """Numbers of a position that devices exchange: its keys and values."""


@runtime_checkable
class Routed(Shardable, Protocol):
    """A mixture whose experts can be on several devices.

    Attributes:
        num_experts: E.
        top_k: Experts that a token takes.
    """

    num_experts: int
    top_k: int


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Creates weights with shapes and no values inside."""
    with keras.StatelessScope(initialize_variables=False):
        yield


def read(
    model: keras.Model | Callable[[], keras.Model] | tracer.CapturedModel,
    *,
    name: str | None = None,
    remat: RematLike = "products",
) -> Workload:
    """Returns the workload of a Keras model.

    Example:

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> workload = tfgpipe.planner.read(model)
    >>> workload.parameters, workload.layers[0].flops.forward
    (36.0, 68.0)

    Args:
        model: A Functional or Sequential model; or a function that returns one, which
            then never has weights, so that any size will do; or what a pipeline has
            captured.
        name: Its name in the table. None for the model's name.
        remat: Policy whose saved results are counted, if it saves some.

    Raises:
        ValueError: If a size other than the batch's is not known.
        TypeError: If it is a model with a `call` of its own.
    """
    if isinstance(model, tracer.CapturedModel):
        return _read_captured(model, name or "", find(remat))
    if not callable(model):
        raise TypeError(
            "`model` must be a workload, a Keras model, or a function that returns "
            f"one. Received {model!r}."
        )
    with without_weights():
        model = model if isinstance(model, keras.Model) else model()
        source = source_model.make_source(source_model.copy_unbuilt(model))
        if source.inputs is None:
            raise ValueError(
                "A plan needs the shapes of a model's inputs. Received model "
                f"'{model.name}' without any. Begin with a `keras.Input`."
            )
        captured = source.capture(source.inputs, {})
        return _read_captured(captured, name or model.name, find(remat))


def _read_captured(captured: tracer.CapturedModel, name: str, remat: Remat) -> Workload:
    compute = next(
        (
            call.layer.compute_dtype
            for call in reversed(captured.graph.calls)
            if isinstance(call.layer, keras.layers.Layer)
        ),
        keras.config.floatx(),  # Of a model of operations only.
    )
    return Workload(
        name=name,
        layers=_layers(captured, remat),
        dtype=compute,
        traced=True,
        remat=remat,
    )


def num_slots(
    build: Callable[[], keras.optimizers.Optimizer], model: keras.Model
) -> float:
    """Returns the optimizer's slots for each trained weight, on average.

    Moments, sums of gradients and averaged weights, as the optimizer makes them; a
    factored one is less than one. In a graph that is never run they take no memory.

    Args:
        build: Returns the optimizer.
        model: The model to train. Its weights need no values.
    """
    with tf.Graph().as_default():
        weights = [
            keras.Variable("zeros", shape=v.shape, dtype=v.dtype, name=v.name)
            for v in model.trainable_variables
        ]
        optimizer = build()
        optimizer.build(weights)
    slots = [
        s
        for x in keras_internals.optimizers.optimizer_slots(optimizer).values()
        for s in x
    ]
    trained = sum(math.prod(weight.shape) for weight in weights)
    return sum(math.prod(slot.shape) for slot in slots) / max(trained, 1)


def _layers(captured: tracer.CapturedModel, remat: Remat) -> tuple[LayerCost, ...]:
    graph = captured.graph
    specs = {TensorKey(n): _input_spec(captured.specs[n]) for n in graph.input_ids}
    spans = stage_spans([1] * len(graph.calls))
    traced = SegmentProfiler(graph, spans, specs, remat=remat)
    values, received = traced.value_specs(), graph.received_row(traced.value_bytes())
    traffic, workspace = (
        traced.memory_traffic(),
        traced.workspace_bytes(recomputes=False),
    )
    layers = []
    for i, (call, layer) in enumerate(
        zip(graph.calls, profiler.layer_costs(graph, traced), strict=True)
    ):
        tensors, trained_bytes = layer.tensors, layer.weights.trained_bytes
        max_shards = call.layer.max_shards if isinstance(call.layer, Shardable) else 1
        unsharded = WHOLE_TENSORS * tensors.inputs if max_shards > 1 else 0
        of_all_later = received(i, len(graph.calls))[-1] if i else tensors.inputs
        output = next(n for n in call.output_ids if n in values)
        positions = float(math.prod(values[output].shape[1:-1]))
        whole = dataclasses.replace(
            layer,
            traffic=traffic[i],
            tensors=dataclasses.replace(
                tensors,
                workspace=max(workspace[i] - trained_bytes, 0),
                received=float(of_all_later),
                replicated=min(unsharded, tensors.saved),
            ),
            # Rows of its products for each example.
            positions=positions,
            max_shards=max_shards,
            **_exchanged(call.layer, EXAMPLES * positions),
        )
        layers.append(whole.per_example(EXAMPLES))
    return tuple(layers)


def _exchanged(layer: Any, num_positions: float) -> dict[str, Any]:
    """Returns the arguments of a `LayerCost` on what its shards exchange."""
    if isinstance(layer, Routed):
        return {"num_reductions": 0, "routing": (layer.num_experts, layer.top_k)}
    if isinstance(layer, InParts):
        size = layer.key_value_size * dtype_bytes(layer.compute_dtype)
        return {"max_parts": MOST_PARTS, "keys_values": size * num_positions}
    return {}


def _input_spec(tensor: keras.KerasTensor) -> tf.TensorSpec:
    """Returns the spec of a few examples of an input."""
    if None in tensor.shape[1:]:
        raise ValueError(
            "A plan depends on all sizes but that of the batch. Received an input "
            f"'{tensor.name}' of shape {tensor.shape}. Build the model for one size."
        )
    return tf.TensorSpec([EXAMPLES, *tensor.shape[1:]], tensor.dtype)
