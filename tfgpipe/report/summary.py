"""The table that `PipelinedModel.summary` prints: Keras' own, with stages and devices.

Keras' table of a model has no room for further columns, and shows the pipeline as one
layer. This one has a row for each layer inside, models among them opened as far as the
pipeline opens them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import rich.console
import rich.markup
import rich.table
from absl import logging

from tfgpipe._util import num_bytes, readable_bytes
from tfgpipe.pipelined_layer import PipelinedLayer

_HEADER = ("Layer (type)", "Stage", "Device", "Output Shape", "Param #")


@dataclasses.dataclass(frozen=True)
class SummaryOptions:
    """What `keras.Model.summary` takes.

    Attributes:
        line_length: Width of the table. Defaults to that of the terminal, at most 100.
        positions: Where each column ends, as a fraction of the width.
        expand_nested: Whether layers inside layers have rows of their own.
        show_trainable: Whether a column tells which layers are trainable.
        layer_range: Names, or patterns, of the first and last layer to show.
    """

    line_length: int | None = None
    positions: Sequence[float] | None = None
    expand_nested: bool = False
    show_trainable: bool = False
    layer_range: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True)
class _Row:
    """One layer.

    Attributes:
        layer: The layer or operation, or None for an input.
        name: Its name.
        stage: The stages that call it.
        device: Their devices.
        shape: Shapes of what it gives.
        connected: Names of what it reads.
    """

    layer: Any
    name: str
    stage: str
    device: str
    shape: str
    connected: tuple[str, ...] = ()


def summary_text(
    model: keras.Model, pipelined: PipelinedLayer, title: str, options: SummaryOptions
) -> str:
    """Returns the summary of a model that is one pipeline.

    Args:
        model: The model.
        pipelined: The pipeline in it.
        title: The line below the model's name.
        options: As `keras.Model.summary` takes them.
    """
    rows, is_chain = _rows(pipelined)
    rows = rows[_range([row.name for row in rows], options.layer_range)]
    header = list(_HEADER)
    if not is_chain:
        header.append("Connected to")
    if options.show_trainable:
        header.append("Trainable")
    width = options.line_length or min(100, shutil.get_terminal_size().columns - 4)
    widths = _widths(width, options.positions, header)
    table = rich.table.Table(show_lines=True)
    for name, column in zip(header, widths, strict=True):
        table.add_column(
            name,
            justify="right" if name == "Param #" else "left",
            width=column,
            min_width=len(name) if name in ("Stage", "Device") else None,
            overflow="fold",
        )
    for row in rows:
        for cells in _cells(row, options, connected=not is_chain):
            table.add_row(*map(rich.markup.escape, cells))
    console = rich.console.Console(highlight=False, color_system=None, width=width)
    with console.capture() as capture:
        console.print(rich.markup.escape(f'Model: "{model.name}"'))
        console.print(rich.markup.escape(title))
        console.print(table)
    return capture.get() + "\n".join(_totals(model))


def show_summary(summary: str, print_fn: Callable[[str], Any] | None) -> None:
    """Prints a summary as Keras does: by `print_fn`, or logs it where Keras logs."""
    if print_fn is None:
        interactive = keras.config.is_interactive_logging_enabled()
        print_fn = rich.console.Console(highlight=False).out if interactive else None
    (print_fn or logging.info)(summary)


def _rows(pipelined: PipelinedLayer) -> tuple[list[_Row], bool]:
    """Returns a row for each layer, and whether each reads the one before alone."""
    if not pipelined.built:
        layers = dict.fromkeys(pipelined.layers)
        return [_Row(layer, layer.name, "?", "?", "?") for layer in layers], True
    pipeline = pipelined.pipeline
    recorded, network = pipeline.captured, pipeline.captured.graph
    stage_of = [stage.index for stage in pipeline.stages for _ in stage.segment.calls]
    makers: dict[int, str] = {n: recorded.specs[n].name for n in network.input_ids}
    uses: dict[int, list[int]] = {}
    before: tuple[int, ...] = network.input_ids
    is_chain = len(before) == 1
    for i, call in enumerate(network.calls):
        makers.update(dict.fromkeys(call.output_ids, call.layer.name))
        is_chain = is_chain and set(call.input_ids) == set(before)
        is_chain = is_chain and id(call.layer) not in uses
        uses.setdefault(id(call.layer), []).append(i)
        before = call.output_ids
    rows = []
    if not is_chain:
        for n in network.input_ids:
            shape = _shape([recorded.specs[n].shape])
            rows.append(_Row(None, makers[n], "-", "-", shape))
    for places in uses.values():
        calls = [network.calls[i] for i in places]
        stages = sorted({stage_of[i] for i in places})
        layer = calls[0].layer
        reads = dict.fromkeys(makers[n] for call in calls for n in call.input_ids)
        rows.append(
            _Row(
                layer,
                layer.name,
                ", ".join(map(str, stages)),
                "; ".join(pipelined.mesh.short_names(k) for k in stages),
                _shape([recorded.specs[n].shape for n in calls[0].output_ids]),
                tuple(reads),
            )
        )
    return rows, is_chain


def _cells(
    row: _Row,
    options: SummaryOptions,
    *,
    connected: bool,
    inner: Any = None,
    depth: int = 0,
) -> Iterator[list[str]]:
    """Yields the cells of a row, then those of the layers inside if they are to show.

    Args:
        row: The row.
        options: What the table shows.
        connected: Whether there is a column of what is read.
        inner: A layer inside the row's layer.
        depth: How far inside.
    """
    layer = inner if depth else row.layer
    name = layer.name if depth else row.name
    kind = "InputLayer" if layer is None else type(layer).__name__
    is_layer = isinstance(layer, keras.layers.Layer)
    params = "0" if not is_layer or layer.built else "0 (unbuilt)"
    if is_layer and layer.built:
        params = f"{layer.count_params():,}"
    prefix = "   " * depth + "└ " if depth else ""
    shape = _output_shape(layer) if depth else row.shape
    cells = [f"{prefix}{name} ({kind})", row.stage, row.device, shape, params]
    if connected:
        cells.append("-" if depth else ", ".join(row.connected) or "-")
    if options.show_trainable:
        has_weights = is_layer and layer.weights
        cells.append(("Y" if layer.trainable else "N") if has_weights else "-")
    yield cells
    inside = getattr(layer, "layers", None) if options.expand_nested else None
    for each in inside or ():
        yield from _cells(
            row, options, connected=connected, inner=each, depth=depth + 1
        )


def _output_shape(layer: Any) -> str:
    """Returns the shapes of what a layer inside another gave, if Keras knows."""
    try:
        outputs = layer.output
    except AttributeError:  # It has not been called on symbolic tensors.
        return "?"
    return _shape([x.shape for x in keras.tree.flatten(outputs)])


def _shape(shapes: Sequence[Any]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes) or "-"


def _widths(
    width: int, positions: Sequence[float] | None, header: Sequence[str]
) -> Sequence[int | None]:
    """Returns the width of each column, or None for as wide as its cells."""
    if positions is None:
        return [None] * len(header)
    if len(positions) != len(header):
        raise ValueError(
            "`positions` says for each column where it ends. Expected "
            f"{len(header)} numbers, one for each of {', '.join(header)}; received "
            f"{list(positions)}. Leave it out, or give as many."
        )
    # A border on both sides of each column, and a space on both sides of its text.
    free = width - 3 * len(header) - 1
    return [int((b - a) * free) for a, b in itertools.pairwise([0.0, *positions])]


def _range(names: Sequence[str], layer_range: Sequence[str] | None) -> slice:
    """Returns which layers to show, both ends included, as Keras does."""
    if layer_range is None:
        return slice(None)
    places = [
        [i for i, name in enumerate(names) if re.match(pattern, name)]
        for pattern in layer_range
    ]
    if len(places) != 2 or not all(places):
        raise ValueError(
            "`layer_range` holds the names, or patterns of names, of the first and the "
            f"last layer to show. Received {list(layer_range)}; the layers are "
            f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
        )
    first, last = sorted((min(places[0]), max(places[1])))
    return slice(first, last + 1)


def _totals(model: keras.Model) -> list[str]:
    """Returns the lines below the table, which count as Keras counts."""
    counted = {
        "Trainable": model.trainable_weights,
        "Non-trainable": model.non_trainable_weights,
    }
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        counted["Optimizer"] = optimizer.variables
    everything = [v for some in counted.values() for v in some]
    return [
        f" {name} params: {sum(math.prod(v.shape) for v in some):,} "
        f"({readable_bytes(sum(map(num_bytes, some)))})"
        for name, some in {"Total": everything, **counted}.items()
    ]
