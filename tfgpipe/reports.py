"""Tables that show how a model was cut into stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import keras

from tfgpipe import mesh as mesh_lib
from tfgpipe.pipelined_layer import PipelinedLayer
from tfgpipe.stage import Stage

_HEADER = ("stage", "device", "layers", "parameters", "weights", "slots", "share")
_NUMERIC = {"parameters", "weights", "slots", "share"}


def stage_table(
    model: keras.Model | PipelinedLayer,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> str:
    """Returns a table of the stages of every `PipelinedLayer` in a model.

    One line a stage: its device, layers, number of parameters, bytes of weights and of
    the optimizer's slots for them, and its share of the parameters.

    Args:
        model: A built model, or a built `PipelinedLayer`.
        optimizer: The optimizer whose slots to count. Defaults to the model's own.
            Slots show as `-` until the optimizer is built.

    Raises:
        ValueError: If the model holds no `PipelinedLayer`.
        RuntimeError: If a `PipelinedLayer` is not built.
    """
    pipelines = list(_pipelines(model))
    if not pipelines:
        raise ValueError(
            f"`stage_table` shows pipelines. Received {type(model).__name__} "
            f"'{model.name}', which holds no PipelinedLayer."
        )
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    tables = []
    for layer in pipelines:
        rows = [_row(layer, stage, optimizer) for stage in layer.stages]
        title = (
            f"{layer.name}: {layer.num_stages} stages, "
            f"{layer.num_microbatches} microbatches, remat={layer.remat}"
        )
        tables.append(f"{title}\n{_format([_HEADER, *rows])}")
    return "\n\n".join(tables)


def readable_bytes(count: float) -> str:
    """Returns a number of bytes as people read it.

    >>> readable_bytes(512), readable_bytes(67_108_864)
    ('512 B', '64.0 MiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while count >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} B" if power == 0 else f"{count:.1f} {units[power]}"


def _pipelines(layer: keras.layers.Layer) -> Iterator[PipelinedLayer]:
    if isinstance(layer, PipelinedLayer):
        yield layer
        return
    for inner in layer.layers if isinstance(layer, keras.Model) else ():
        yield from _pipelines(inner)


def _row(
    layer: PipelinedLayer, stage: Stage, optimizer: keras.optimizers.Optimizer | None
) -> tuple[str, ...]:
    parameters = [_parameters(s) for s in layer.stages]
    mine, total = parameters[stage.index], sum(parameters)
    return (
        str(stage.index),
        ", ".join(map(mesh_lib.short_name, layer.mesh.stage(stage.index))),
        _layer_names(stage.layers),
        f"{mine:,}",
        readable_bytes(_bytes([*stage.weights, *stage.state])),
        _slots(stage, optimizer),
        f"{100 * mine / total:.1f}%" if total else "-",
    )


def _parameters(stage: Stage) -> int:
    return sum(layer.count_params() for layer in stage.layers)


def _layer_names(layers: Sequence[keras.layers.Layer]) -> str:
    if len(layers) <= 2:
        return ", ".join(layer.name for layer in layers)
    return f"{layers[0].name} .. {layers[-1].name} ({len(layers)})"


def _slots(stage: Stage, optimizer: keras.optimizers.Optimizer | None) -> str:
    if optimizer is None or not optimizer.built:
        return "-"
    # A slot's name starts with the path of its weight, slashes made underscores.
    prefixes = tuple(w.path.replace("/", "_") + "_" for w in stage.weights)
    return readable_bytes(
        _bytes(v for v in optimizer.variables if v.name.startswith(prefixes))
    )


def _bytes(variables: Iterable[keras.Variable]) -> int:
    return sum(v.value.dtype.size * v.value.shape.num_elements() for v in variables)


def _format(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if title in _NUMERIC else cell.ljust(width)
            for cell, width, title in zip(row, widths, _HEADER, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)
