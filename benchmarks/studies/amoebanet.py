"""AmoebaNet-D as a workload, from its cells alone: at any size, in no time.

It goes through the cells of `params.image.amoebanet` as that builds them: what
each convolution, pool and sum reads and writes. A cell is one layer of the workload, as
GPipe partitioned it.

Kept for the backward is what XLA on a TPU has to keep: what each convolution returns.
Normalizations, ReLUs and sums are fused into what reads them, and computed again there;
the backward of a pool reads its input. At a time a backward holds the gradients of one
cell. Numbers are bfloat16.
"""

from __future__ import annotations

import dataclasses

from tfgpipe.costs import LayerCost, PassCost, TensorBytes, Weights
from tfgpipe.planner import Workload
from tfgpipe_params.image.amoebanet import NORMAL, REDUCTION, Cell, Operation

SIZE = 2  # Bytes of a number.


@dataclasses.dataclass(frozen=True)
class Image:
    """What goes from operation to operation: a square of so many channels."""

    edge: int
    channels: int

    @property
    def numbers(self) -> int:
        """How many it holds, for one example."""
        return self.edge**2 * self.channels


@dataclasses.dataclass
class Tape:
    """What a cell's operations add up to, for one example."""

    parameters: int = 0
    flops: int = 0
    kept: int = 0
    moved: int = 0

    def conv(
        self,
        x: Image,
        filters: int,
        *,
        window: tuple[int, int] = (1, 1),
        stride: int = 1,
        normalized: bool = True,
    ) -> Image:
        """Notes ReLU, convolution, batch normalization."""
        out = Image(-(-x.edge // stride), filters)
        weights = window[0] * window[1] * x.channels * filters
        # The scale and shift of the normalization; its moving averages are not trained.
        self.parameters += weights + (2 * filters if normalized else 0)
        self.flops += 2 * out.edge**2 * weights
        self.kept += out.numbers
        # ReLU before; normalization after: statistics, then the result.
        self.moved += 2 * x.numbers + 3 * out.numbers
        return out

    def pool(self, x: Image, stride: int) -> Image:
        """Notes a pool."""
        out = Image(-(-x.edge // stride), x.channels)
        self.moved += x.numbers + out.numbers
        return out

    def add(self, x: Image) -> Image:
        """Notes a sum of two."""
        self.moved += 3 * x.numbers
        return x


def amoebanet_d(
    *, num_layers: int, num_filters: int, classes: int = 1000, edge: int = 224
) -> Workload:
    """Returns the workload.

    >>> round(amoebanet_d(num_layers=18, num_filters=208).parameters / 1e6, 1)
    81.5

    Args:
        num_layers: L, normal cells.
        num_filters: D, filters of the first normal cells.
        classes: Number of classes.
        edge: Height and width of an image.
    """
    stem, image = Tape(), Image(edge, 3)
    filters = num_filters // 4
    x = stem.conv(image, filters, window=(3, 3), stride=2)
    layers = [_layer("stem", stem, [image], x)]
    kinds = [REDUCTION, REDUCTION] + [NORMAL] * (num_layers // 3)
    kinds += 2 * ([REDUCTION] + [NORMAL] * (num_layers // 3))
    last = before = x
    for i, kind in enumerate(kinds):
        filters *= kind.stride
        tape = Tape()
        out = _cell(tape, kind, last, before, filters)
        layers.append(_layer(f"cell {i}", tape, [last, before], out))
        last, before = out, last
    head = Tape(parameters=(last.channels + 1) * classes)
    head.flops = 2 * last.channels * classes
    layers.append(_layer("head", head, [last], Image(1, classes)))
    return Workload(
        name=f"AmoebaNet-D ({num_layers}, {num_filters})",
        layers=tuple(layers),
        dtype="float32",
    )


def _layer(name: str, tape: Tape, reads: list[Image], out: Image) -> LayerCost:
    return LayerCost(
        name=name,
        weights=Weights(tape.parameters),
        flops=PassCost(tape.flops, 2 * tape.flops),
        traffic=PassCost(SIZE * tape.moved, 2 * SIZE * tape.moved),
        tensors=TensorBytes(
            saved=SIZE * tape.kept,
            workspace=SIZE * tape.kept,
            inputs=SIZE * sum(image.numbers for image in reads),
            outputs=SIZE * out.numbers,
        ),
        positions=out.edge**2,
    )


def _cell(tape: Tape, kind: Cell, last: Image, before: Image, filters: int) -> Image:
    """Notes a cell that reads the outputs of the last and the one before."""
    states = [tape.conv(last, filters), _fitted(tape, before, filters, last.edge)]
    for terms in kind.sums:
        made = [
            _operation(tape, what, states[i], filters, kind.stride if i < 2 else 1)
            for i, what in terms
        ]
        states.append(tape.add(made[0]))
    return Image(states[-1].edge, sum(states[i].channels for i in kind.output))


def _operation(
    tape: Tape, what: Operation, x: Image, filters: int, stride: int
) -> Image:
    if what == "none":
        return x if stride == 1 else tape.conv(x, filters, stride=stride)
    if what == "conv_1x1":
        return tape.conv(x, filters, stride=stride)
    if what in ("avg_3x3", "max_3x3", "max_2x2"):
        return tape.pool(x, stride)
    x = tape.conv(x, filters // 4)
    if what == "conv_3x3":
        x = tape.conv(x, filters // 4, window=(3, 3), stride=stride)
    else:
        # Of two windows, one skips columns and one rows; the larger result counts.
        x = tape.conv(x, filters // 4, window=(1, 7))
        x = tape.conv(x, filters // 4, window=(7, 1), stride=stride)
    return tape.conv(x, filters)


def _fitted(tape: Tape, x: Image, filters: int, edge: int) -> Image:
    """Notes what makes the output of the cell before the last fit the last one's."""
    if x.edge != edge:
        return tape.conv(x, filters, stride=2)
    return x if x.channels == filters else tape.conv(x, filters)
