"""Reports on a built model: the stage table, what each device holds."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Sequence
from typing import Any

import keras

from tfgpipe._util import layer_names, num_bytes, readable_bytes, text_table
from tfgpipe.devices import sharding, short_name
from tfgpipe.distribution import optimizer_slots, replica_context
from tfgpipe.pipelined_layer import PipelinedLayer, find_pipelines
from tfgpipe.report.memory import DeviceMemory, MemoryGrid
from tfgpipe.stage import owned_variables

_HEADER = ("stage", "device", "layers", "parameters", "weights", "slots", "share")
_WORDS = ("stage", "device", "layers")


def stage_table(
    model: keras.Model | PipelinedLayer,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> str:
    """Returns a table of the stages of every `PipelinedLayer` in a model.

    One line a stage: its device, layers, number of parameters, bytes of weights and of
    the optimizer's slots for them, and its share of the parameters. A weight that
    stages share counts at the first, its owner, which the others name. Of a stage in
    shards devices and bytes are told one by one, and weights in parts follow below.

    Args:
        model: A built model, or a built `PipelinedLayer`.
        optimizer: The optimizer whose slots to count. Defaults to the model's own.
            Slots show as `-` until the optimizer is built.

    Raises:
        ValueError: If the model holds no `PipelinedLayer`.
        RuntimeError: If a `PipelinedLayer` is not built.

    Example:

    >>> layers = [keras.layers.Dense(8, name=f"dense_{i}") for i in range(4)]
    >>> pipelined = tfgpipe.PipelinedLayer(
    ...     layers, num_stages=2, num_microbatches=4, name="pipe"
    ... )
    >>> pipelined.build((None, 8))
    >>> print(tfgpipe.stage_table(pipelined))
    pipe: 2 stages, 4 microbatches, remat=stage
    stage  device  layers            parameters  weights  slots  share
    0      CPU:0   dense_0, dense_1         144    576 B      -  50.0%
    1      CPU:1   dense_2, dense_3         144    576 B      -  50.0%
    """
    optimizer = _optimizer(model, optimizer)
    parts = []
    for layer in _find_pipelines(model):
        T = layer.mesh.num_shards
        title = (
            f"{layer.name}: {layer.num_stages} stages{f' in {T} shards' * (T > 1)}, "
            f"{layer.num_microbatches} microbatches, remat={layer.remat}"
        )
        rows = _rows(layer, optimizer)
        table = text_table(_HEADER, rows, left=_WORDS)
        sharded = sharding.sharding_table(layer.layers)
        parts.append("\n".join(filter(None, (title, table, sharded))))
    return "\n\n".join(parts)


def device_memory(
    model: keras.Model | PipelinedLayer,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> MemoryGrid:
    """Returns what each device of the first pipeline in a model holds.

    `tfgpipe.plot_mesh(grid)` draws it, `holdings.draw(grid)` as text.

    Args:
        model: As for `stage_table`.
        optimizer: Likewise.

    Returns:
        `[replica][stage][shard]`.

    Raises:
        ValueError, RuntimeError: As `stage_table` does.
    """
    layer, *_ = _find_pipelines(model)
    optimizer = _optimizer(model, optimizer)
    stages = []
    strategy: Any = layer.pipeline.placement.strategy
    # Outside the scope only the copies of one replica are visible.
    with strategy.scope() if strategy else contextlib.nullcontext():
        for stage, variables in owned_variables(layer.stages):
            names = layer_names([inner.name for inner in stage.layers])
            kept = None
            if optimizer is not None and optimizer.built:
                kept = _bytes_by_device(optimizer_slots(optimizer, variables))
            stages.append((names, _bytes_by_device(variables), kept))

    def holding(k: int, device: str) -> DeviceMemory:
        names, weights, kept = stages[k]
        count = None if kept is None else kept[device]
        return DeviceMemory(short_name(device), names, weights[device], count)

    return [
        [
            [holding(k, device) for device in devices]
            for k, devices in enumerate(replica)
        ]
        for replica in layer.mesh.devices
    ]


def _bytes_by_device(variables: Sequence[keras.Variable]) -> collections.Counter[str]:
    """Returns the bytes that variables, all copies of them, take of each device."""
    held: collections.Counter[str] = collections.Counter()
    for variable in variables:
        for copy in replica_context.replica_copies(variable.value):
            held[copy.device] += num_bytes(variable)
    return held


def _find_pipelines(model: keras.Model | PipelinedLayer) -> list[PipelinedLayer]:
    pipelines = find_pipelines(model)
    if not pipelines:
        raise ValueError(
            f"`stage_table` shows pipelines. Received {type(model).__name__} "
            f"'{model.name}', which holds no PipelinedLayer."
        )
    return pipelines


def _optimizer(
    model: keras.Model | PipelinedLayer,
    optimizer: keras.optimizers.Optimizer | None,
) -> keras.optimizers.Optimizer | None:
    return getattr(model, "optimizer", None) if optimizer is None else optimizer


def _rows(
    layer: PipelinedLayer, optimizer: keras.optimizers.Optimizer | None
) -> list[tuple[str, ...]]:
    owned = [variables for _, variables in owned_variables(layer.stages)]
    parameters = [_parameters(layer, variables) for variables in owned]
    total = sum(parameters)
    owners = {id(v): k for k, variables in enumerate(owned) for v in variables}
    rows: list[tuple[str, ...]] = []
    for stage, variables, mine in zip(layer.stages, owned, parameters, strict=True):
        names = []
        for inner in stage.layers:
            places = {owners[id(v)] for v in getattr(inner, "variables", ())}
            elsewhere = sorted(places - {stage.index})
            names.append(
                f"{inner.name} (of stage {elsewhere[0]})" if elsewhere else inner.name
            )
        numbers, T = stage.shard_indices, layer.mesh.num_shards
        of_shards = [[v for v in variables if numbers.get(v, 0) == t] for t in range(T)]
        rows.append(
            (
                str(stage.index),
                layer.mesh.short_names(stage.index),
                layer_names(names),
                f"{mine:,}",
                " + ".join(_bytes(some) for some in of_shards),
                _slots(of_shards, optimizer),
                f"{100 * mine / total:.1f}%" if total else "-",
            )
        )
    return rows


def _parameters(layer: PipelinedLayer, variables: Sequence[keras.Variable]) -> int:
    weights = set(map(id, layer.weights))  # Which seeds are not among.
    return sum(math.prod(v.shape) for v in variables if id(v) in weights)


def _slots(
    of_shards: Sequence[Sequence[keras.Variable]],
    optimizer: keras.optimizers.Optimizer | None,
) -> str:
    if optimizer is None or not optimizer.built:
        return "-"
    return " + ".join(
        _bytes(optimizer_slots(optimizer, variables)) for variables in of_shards
    )


def _bytes(variables: Sequence[keras.Variable]) -> str:
    return readable_bytes(sum(map(num_bytes, variables)))
