"""The graph of a training step, traced and not run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfgpipe import schedules
from tfgpipe._compat import functions
from tfgpipe.distribution import optimizer_slots
from tfgpipe.pipelined_layer import PipelinedLayer, find_pipelines
from tfgpipe.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Step:
    """A traced training step.

    Attributes:
        model: The model.
        pipeline: Its first pipeline.
        graph: The graph, which calls the stage functions.
        devices: Full names of the devices, replica by replica, stage by stage.
    """

    model: keras.Model
    pipeline: PipelinedLayer
    graph: tf.Graph
    devices: tuple[str, ...]


def trace(
    model: keras.Model, batch: Any, *, platform: Literal["GPU", "TPU"] | None
) -> Step:
    """Returns a training step of a model, traced and not run.

    Args:
        model: A compiled model with a pipeline in it.
        batch: The batch of a step, `(x, y)` or `(x, y, sample_weight)`: arrays, tensors
            or `tf.TensorSpec`, as `dataset.element_spec` gives them. All sizes are
            known. With replicas it is the batch of one of them.
        platform: Type of the devices that stages are traced for, whatever they are
            on; None for the devices that they are on.

    Raises:
        ValueError: If the model has no pipeline or is not compiled, or a size is not
            known.
    """
    pipelines = find_pipelines(model)
    if not pipelines or getattr(model, "optimizer", None) is None:
        raise ValueError(
            "A dry run traces a training step of a compiled model with a pipeline. "
            f"Received {type(model).__name__} '{model.name}' with {len(pipelines)} "
            "pipelines. Use `tfgpipe.pipeline(model, ...)`, then `compile`."
        )
    specs = tf.nest.map_structure(_spec, batch)
    strategy = model.distribute_strategy
    if not model.built:
        with strategy.scope():
            model.build(tf.nest.map_structure(_open_shape, specs[0]))
    if not model.optimizer.built:
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)

    def step(*data: Any) -> Any:
        return strategy.run(lambda *data: model.train_step(data), args=data)

    traced = tf.function(step, autograph=False)
    with contextlib.ExitStack() as stack:
        for each in pipelines:
            stack.enter_context(each.traced_for(platform))
        graph = functions.without_grappler(traced.get_concrete_function)(*specs).graph
    pipeline = pipelines[0]
    mesh = (d for replica in pipeline.mesh.devices for stage in replica for d in stage)
    return Step(model, pipeline, graph, tuple(dict.fromkeys(mesh)))


def _open_shape(spec: tf.TensorSpec) -> tuple[int | None, ...]:
    """Returns the shape of a batch of any number of examples."""
    return (None, *spec.shape[1:])


def _spec(x: Any) -> tf.TensorSpec:
    try:
        is_spec = isinstance(x, tf.TensorSpec)
        spec = x if is_spec else tf.TensorSpec.from_tensor(tf.convert_to_tensor(x))
    except (ValueError, TypeError) as error:
        raise ValueError(
            "`batch` is what a step takes, such as (x, y), of arrays, tensors or "
            f"`tf.TensorSpec`. Received {x!r}. {error}"
        ) from None
    if not spec.shape.is_fully_defined():
        raise ValueError(
            "A dry run needs all sizes of a batch, the number of examples among them. "
            f"Received {spec}. Batch with `drop_remainder=True`, or give an example."
        )
    return spec


def on_other_devices(step: Step, names: Sequence[str]) -> tf.compat.v1.GraphDef:
    """Returns the graph of a step with other names for its devices.

    Args:
        step: The step.
        names: A full name for each of its devices.
    """
    renamed = dict(zip(step.devices, names, strict=True))
    graph_def = step.graph.as_graph_def(add_shapes=True)
    inner = (f.node_def for f in graph_def.library.function)
    for node in itertools.chain(graph_def.node, *inner):
        node.device = renamed.get(node.device, node.device)
    return graph_def


def innermost(function: str, library: Mapping[str, Any]) -> str:
    """Returns the function that a wrapper calls, or the function itself.

    Args:
        function: Its name in the library.
        library: The functions of a graph.
    """
    passing = ("Identity", "NoOp")
    nodes = [n for n in library[function].node_def if n.op not in passing]
    if len(nodes) == 1 and nodes[0].attr["f"].func.name:
        return innermost(nodes[0].attr["f"].func.name, library)
    return function


def layer_names(step: Step) -> tuple[str, ...]:
    """Returns the names of the layers of a model, those in its pipeline first."""
    inner = [layer.name for layer in step.pipeline.layers]
    return tuple(dict.fromkeys([*inner, *(layer.name for layer in step.model.layers)]))


def schedule(model: keras.Model, pipeline: PipelinedLayer) -> Schedule:
    """Returns the order of a pipeline's actions: GPipe's, without one of the model."""
    found = getattr(model, "schedule", None)
    return found or schedules.gpipe(pipeline.num_stages, pipeline.num_microbatches)


def batch_size(batch: Any) -> int:
    """Returns the number of examples of a batch."""
    return int(tf.nest.flatten(batch)[0].shape[0])


def num_slots(model: keras.Model) -> float:
    """Returns the optimizer's slots for each trained weight, on average."""
    slots = optimizer_slots(model.optimizer, model.trainable_variables)
    trained = sum(math.prod(v.shape) for v in model.trainable_variables)
    return sum(math.prod(slot.shape) for slot in slots) / max(trained, 1)
