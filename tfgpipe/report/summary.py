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

from tfgpipe._util import IdentityMap, num_bytes, readable_bytes
from tfgpipe.pipelined_layer import PipelinedLayer


@dataclasses.dataclass(frozen=True)
class _Row:
    """One layer.

    Attributes:
        layer: The layer or operation, or None for an input.
        name: Its name.
        stage: The stages that call it.
        device: Their devices.
        shape: Shapes of its outputs.
        connected: Names of the layers that it takes inputs of.
    """

    layer: Any
    name: str
    stage: str
    device: str
    shape: str
    connected: str = ""


def print_summary(
    model: keras.Model,
    *,
    line_length: int | None = None,
    positions: Sequence[float] | None = None,
    print_fn: Callable[[str], Any] | None = None,
    expand_nested: bool = False,
    show_trainable: bool = False,
    layer_range: Sequence[str] | None = None,
) -> None:
    """Prints the summary of a `PipelinedModel`; logs it where Keras logs.

    Args:
        model: The model.
        line_length: Width of a line. This and all that follow are those of
            `keras.Model.summary`.
        positions: End of each column, as a fraction of the width.
        print_fn: A function to call with the text.
        expand_nested: True for rows of layers inside layers.
        show_trainable: True for a column of trainable layers.
        layer_range: Names, or patterns, of the first and last layer to show.
    """
    pipelined = model.pipelined
    title = (
        f"{pipelined.num_stages} stages, {pipelined.num_microbatches} microbatches, "
        f"schedule {model.schedule.name}"
    )
    rows, is_chain = _rows(pipelined)
    rows = rows[_range([row.name for row in rows], layer_range)]
    header = [
        *("Layer (type)", "Stage", "Device", "Output Shape", "Param #"),
        *([] if is_chain else ["Connected to"]),
        *(["Trainable"] if show_trainable else []),
    ]
    width = line_length or min(100, shutil.get_terminal_size().columns - 4)
    table = rich.table.Table(show_lines=True)
    for name, column in zip(header, _widths(width, positions, header), strict=True):
        table.add_column(
            name,
            justify="right" if name == "Param #" else "left",
            width=column,
            min_width=len(name) if name in ("Stage", "Device") else None,
            overflow="fold",
        )
    for row in rows:
        for cells in _cells(row, row.layer, 0 if expand_nested else None):
            shown = [cells[name] for name in header]
            table.add_row(*map(rich.markup.escape, shown))
    console = rich.console.Console(highlight=False, color_system=None, width=width)
    with console.capture() as capture:
        console.print(rich.markup.escape(f'Model: "{model.name}"'))
        console.print(rich.markup.escape(title))
        console.print(table)
    if print_fn is None:
        interactive = keras.config.is_interactive_logging_enabled()
        out = rich.console.Console(highlight=False).out
        print_fn = out if interactive else logging.info
    print_fn(capture.get() + "\n".join(_totals(model)))


def _rows(pipelined: PipelinedLayer) -> tuple[list[_Row], bool]:
    """Returns a row for each layer, and whether each takes the one before alone."""
    if not pipelined.built:
        layers = dict.fromkeys(pipelined.layers)
        return [_Row(layer, layer.name, "?", "?", "?") for layer in layers], True
    pipeline = pipelined.pipeline
    specs, graph = pipeline.captured.specs, pipeline.captured.graph
    stage_of = [stage.index for stage in pipeline.stages for _ in stage.segment.calls]
    sources = {n: specs[n].name for n in graph.input_ids}
    calls: IdentityMap[Any, list[int]] = IdentityMap()
    before = graph.input_ids
    is_chain = len(before) == 1
    for i, call in enumerate(graph.calls):
        sources.update(dict.fromkeys(call.output_ids, call.layer.name))
        is_chain = is_chain and set(call.input_ids) == set(before)
        is_chain = is_chain and call.layer not in calls
        calls.setdefault(call.layer, []).append(i)
        before = call.output_ids
    rows = []
    if not is_chain:
        for n in graph.input_ids:
            rows.append(_Row(None, sources[n], "-", "-", _shape([specs[n].shape])))
    for layer, indices in calls.items():
        stages = sorted({stage_of[i] for i in indices})
        inputs = dict.fromkeys(
            sources[n] for i in indices for n in graph.calls[i].input_ids
        )
        rows.append(
            _Row(
                layer,
                layer.name,
                ", ".join(map(str, stages)),
                "; ".join(pipelined.mesh.short_names(k) for k in stages),
                _shape([specs[n].shape for n in graph.calls[indices[0]].output_ids]),
                ", ".join(inputs),
            )
        )
    return rows, is_chain


def _cells(row: _Row, layer: Any, depth: int | None) -> Iterator[dict[str, str]]:
    """Yields the cells of a layer by column, then those of the layers inside."""
    is_layer = isinstance(layer, keras.layers.Layer)
    params = "0 (unbuilt)" if is_layer else "0"
    if is_layer and layer.built:
        params = f"{layer.count_params():,}"
    name = f"{'   ' * depth}└ {layer.name}" if depth else row.name
    kind = "InputLayer" if layer is None else type(layer).__name__
    has_weights = is_layer and layer.weights
    yield {
        "Layer (type)": f"{name} ({kind})",
        "Stage": row.stage,
        "Device": row.device,
        "Output Shape": _output_shape(layer) if depth else row.shape,
        "Param #": params,
        "Connected to": "-" if depth else row.connected or "-",
        "Trainable": ("Y" if layer.trainable else "N") if has_weights else "-",
    }
    if depth is not None:
        for inner in getattr(layer, "layers", None) or ():
            yield from _cells(row, inner, depth + 1)


def _output_shape(layer: Any) -> str:
    """Returns the output shapes of a layer inside another, if Keras knows them."""
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
    """Returns the slice of layers to show, both ends included, as Keras does."""
    if layer_range is None:
        return slice(None)
    matches = [
        [i for i, name in enumerate(names) if re.match(pattern, name)]
        for pattern in layer_range
    ]
    if len(matches) != 2 or not all(matches):
        raise ValueError(
            "`layer_range` holds the names, or patterns of names, of the first and the "
            f"last layer to show. Received {list(layer_range)}; the layers are "
            f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
        )
    first, last = sorted((min(matches[0]), max(matches[1])))
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
    total = [v for some in counted.values() for v in some]
    return [
        f" {name} params: {sum(math.prod(v.shape) for v in some):,} "
        f"({readable_bytes(sum(map(num_bytes, some)))})"
        for name, some in {"Total": total, **counted}.items()
    ]
