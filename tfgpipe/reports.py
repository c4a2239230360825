"""Tables that show how a model was cut into stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras

from tfgpipe import mesh as mesh_lib
from tfgpipe import tables
from tfgpipe.cutting import pipelines_in
from tfgpipe.footprint import num_bytes
from tfgpipe.pipelined_layer import PipelinedLayer
from tfgpipe.stage import owned_variables
from tfgpipe.strategy import slots

_HEADER = ("stage", "device", "layers", "parameters", "weights", "slots", "share")
_WORDS = ("stage", "device", "layers")


def stage_table(
    model: keras.Model | PipelinedLayer,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> str:
    """Returns a table of the stages of every `PipelinedLayer` in a model.

    One line a stage: its device, layers, number of parameters, bytes of weights and of
    the optimizer's slots for them, and its share of the parameters. A weight that
    stages share counts at the first, its owner, which the others name.

    Args:
        model: A built model, or a built `PipelinedLayer`.
        optimizer: The optimizer whose slots to count. Defaults to the model's own.
            Slots show as `-` until the optimizer is built.

    Raises:
        ValueError: If the model holds no `PipelinedLayer`.
        RuntimeError: If a `PipelinedLayer` is not built.
    """
    pipelines = pipelines_in(model)
    if not pipelines:
        raise ValueError(
            f"`stage_table` shows pipelines. Received {type(model).__name__} "
            f"'{model.name}', which holds no PipelinedLayer."
        )
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    parts = []
    for layer in pipelines:
        title = (
            f"{layer.name}: {layer.num_stages} stages, "
            f"{layer.num_microbatches} microbatches, remat={layer.remat}"
        )
        rows = _rows(layer, optimizer)
        parts.append(f"{title}\n{tables.table(_HEADER, rows, left=_WORDS)}")
    return "\n\n".join(parts)


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
        rows.append(
            (
                str(stage.index),
                ", ".join(map(mesh_lib.short_name, layer.mesh.stage(stage.index))),
                tables.layer_names(names),
                f"{mine:,}",
                tables.readable_bytes(sum(map(num_bytes, variables))),
                _slots(variables, optimizer),
                f"{100 * mine / total:.1f}%" if total else "-",
            )
        )
    return rows


def _parameters(layer: PipelinedLayer, variables: Sequence[keras.Variable]) -> int:
    weights = set(map(id, layer.weights))  # Which seeds are not among.
    return sum(math.prod(v.shape) for v in variables if id(v) in weights)


def _slots(
    variables: Sequence[keras.Variable], optimizer: keras.optimizers.Optimizer | None
) -> str:
    if optimizer is None or not optimizer.built:
        return "-"
    return tables.readable_bytes(sum(map(num_bytes, slots(optimizer, variables))))
