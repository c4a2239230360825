"""Reports on a built model: the stage table, the memory of each device."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import keras

from tfgpipe._util import (
    IdentityMap,
    layer_names,
    num_bytes,
    readable_bytes,
    text_table,
)
from tfgpipe.devices import sharding, short_name
from tfgpipe.distribution import StageStrategy, optimizer_slots
from tfgpipe.pipelined_layer import PipelinedLayer, find_pipelines
from tfgpipe.report.memory import DeviceMemory, MemoryGrid
from tfgpipe.stage import owned_variables

_HEADER = ("stage", "device", "layers", "parameters", "weights", "slots", "share")


def stage_table(
    model: keras.Model | PipelinedLayer,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> str:
    """Returns a table of the stages of every `PipelinedLayer` in a model.

    One line a stage: its device, layers, number of parameters, bytes of weights and of
    the optimizer's slots for them, and its share of the parameters. A weight that
    stages share counts at the first, its owner, which the others name. A sharded stage
    has devices and bytes listed shard by shard, and its sharded weights below.

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
    tables = []
    for layer in _find_pipelines(model):
        T = layer.mesh.num_shards
        # The name that the user gave: the layer of a PipelinedModel has none.
        name = model.name if getattr(model, "pipelined", None) is layer else layer.name
        title = (
            f"{name}: {layer.num_stages} stages{f' in {T} shards' * (T > 1)}, "
            f"{layer.num_microbatches} microbatches, remat={layer.config.remat}"
        )
        rows = _rows(layer, _built_optimizer(model, optimizer))
        table = text_table(_HEADER, rows, left=("stage", "device", "layers"))
        sharded = sharding.sharding_table(layer.layers)
        tables.append("\n".join(filter(None, (title, table, sharded))))
    return "\n\n".join(tables)


def device_memory(
    model: keras.Model | PipelinedLayer,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> MemoryGrid:
    """Returns the memory of each device of the first pipeline in a model.

    `tfgpipe.plot_mesh(grid)` draws it, `tfgpipe.report.draw_memory(grid)` as text.

    Args:
        model: A built model, or a built `PipelinedLayer`.
        optimizer: The optimizer of the slots. Defaults to the model's own.

    Returns:
        `[replica][stage][shard]`.

    Raises:
        ValueError, RuntimeError: As `stage_table` does.
    """
    layer, *_ = _find_pipelines(model)
    optimizer = _built_optimizer(model, optimizer)
    names, weights, slots = [], [], []
    strategy = layer.pipeline.strategy
    # Outside the scope only the copies of one replica are visible.
    with strategy.scope():
        for stage, variables in owned_variables(layer.stages):
            names.append(layer_names([inner.name for inner in stage.layers]))
            weights.append(_bytes_by_device(strategy, variables))
            if optimizer is not None:
                of_stage = optimizer_slots(optimizer, variables)
                slots.append(_bytes_by_device(strategy, of_stage))

    def memory(k: int, device: str) -> DeviceMemory:
        slot_bytes = slots[k][device] if slots else None
        return DeviceMemory(
            short_name(device), names[k], weights[k][device], slot_bytes
        )

    return [
        [[memory(k, device) for device in devices] for k, devices in enumerate(replica)]
        for replica in layer.mesh.devices
    ]


def _bytes_by_device(
    strategy: StageStrategy, variables: Sequence[keras.Variable]
) -> collections.Counter[str]:
    """Returns the bytes that variables, all copies of them, take of each device."""
    held: collections.Counter[str] = collections.Counter()
    for variable in variables:
        for copy in strategy.copies(variable.value):
            held[copy.device] += num_bytes(copy)
    return held


def _find_pipelines(model: keras.Model | PipelinedLayer) -> list[PipelinedLayer]:
    pipelines = find_pipelines(model)
    if not pipelines:
        raise ValueError(
            f"`stage_table` shows pipelines. Received {type(model).__name__} "
            f"'{model.name}', which holds no PipelinedLayer."
        )
    return pipelines


def _built_optimizer(
    model: keras.Model | PipelinedLayer, optimizer: keras.optimizers.Optimizer | None
) -> keras.optimizers.Optimizer | None:
    """Returns the optimizer, or the model's own, if it is built."""
    found = getattr(model, "optimizer", None) if optimizer is None else optimizer
    return found if found is not None and found.built else None


def _rows(
    layer: PipelinedLayer, optimizer: keras.optimizers.Optimizer | None
) -> list[tuple[str, ...]]:
    owned = [variables for _, variables in owned_variables(layer.stages)]
    owners = IdentityMap((v, k) for k, variables in enumerate(owned) for v in variables)
    weights = IdentityMap((v, math.prod(v.shape)) for v in layer.weights)
    # Seeds are no weights.
    parameters = [sum(weights.get(v, 0) for v in variables) for variables in owned]
    total, num_shards = sum(parameters), layer.mesh.num_shards
    rows: list[tuple[str, ...]] = []
    for stage, variables, mine in zip(layer.stages, owned, parameters, strict=True):
        names = []
        for inner in stage.layers:
            others = {owners[v] for v in getattr(inner, "variables", ())}
            others.discard(stage.index)
            remark = f" (of stage {min(others)})" if others else ""
            names.append(f"{inner.name}{remark}")
        shards = [
            [v for v in variables if stage.shard_indices.get(v, 0) == t]
            for t in range(num_shards)
        ]
        slots = "-"
        if optimizer is not None:
            slots = _bytes([optimizer_slots(optimizer, some) for some in shards])
        rows.append(
            (
                str(stage.index),
                layer.mesh.short_names(stage.index),
                layer_names(names),
                f"{mine:,}",
                _bytes(shards),
                slots,
                f"{100 * mine / total:.1f}%" if total else "-",
            )
        )
    return rows


def _bytes(shards: Sequence[Sequence[keras.Variable]]) -> str:
    """Returns the bytes of the variables of each shard."""
    return " + ".join(readable_bytes(sum(map(num_bytes, some))) for some in shards)
