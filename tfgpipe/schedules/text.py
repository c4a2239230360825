"""Schedules as text: cells of torch's CSV, and of drawings.

A row is a device. `torch.distributed.pipelining` writes an action as stage, letter and
microbatch:

    0F0,0F1,,0B0,0F2,0B1
    ,1F0,1B0,1F1,1B1,1F2

`F` is a forward, `B` a whole backward, `I` and `W` its halves; an empty cell is an idle
time slot. Files of older versions have `B` for the first half, if there is a `W`, and
`BW` for a whole backward.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from tfgpipe.schedules.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    ActionKind,
)

# Kind, stage and microbatch of an action.
Entry: TypeAlias = tuple[ActionKind, int, int]
_Cell: TypeAlias = tuple[str, int, int]

_LETTERS = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()} | {"BW": BACKWARD}
# What torch does beside computing. Here the executor does it when it has to.
_IGNORED = {"SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"}
_CELL = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_DRAWN_ROW = re.compile(r"\s*(?:stage|device) +(\d+)  (.*)")
_DRAWN_CELL = re.compile(r"([A-Z])(\d+)([a-z]?)")


def write_csv(rows: Iterable[Sequence[Entry | None]]) -> str:
    """Returns rows of actions as torch's CSV, None as an empty cell.

    Raises:
        ValueError: If an action is of a kind that torch does not have.
    """

    def cell(entry: Entry | None) -> str:
        if entry is None:
            return ""
        kind, k, m = entry
        if kind not in _LETTERS:
            raise ValueError(
                "The CSV of torch has forwards, backwards and their halves. Received "
                f"an action of kind {kind.name!r}. Write the schedule without it."
            )
        return f"{k}{_LETTERS[kind]}{m}"

    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([*map(cell, row)] for row in rows)
    return file.getvalue()


def read_csv(text: str) -> list[list[Entry]]:
    """Returns the actions of each row of torch's CSV; communication is left out.

    Raises:
        ValueError: If a cell is of another form.
    """
    rows = csv.reader(io.StringIO(text.strip("\n\r")))
    return _resolve(
        [
            [found for cell in row for found in _csv_cells(p, cell.strip())]
            for p, row in enumerate(rows)
        ]
    )


def _csv_cells(p: int, cell: str) -> Iterator[_Cell]:
    """Yields the computations of a cell: none, one, or two that overlap."""
    both = _OVERLAP.fullmatch(cell)
    if both:
        for each in both[1].split(";"):
            yield from _csv_cells(p, each.strip())
        return
    match = _CELL.fullmatch(cell)
    if cell and (match is None or match[2] not in {*_KINDS, *_IGNORED}):
        raise ValueError(
            "A cell is a stage, a letter and a microbatch, such as 2F0; letters are "
            f"{', '.join(_KINDS)}. Received {cell!r} in row {p + 1}."
        )
    if match is not None and match[2] in _KINDS:
        if not match[3]:
            raise ValueError(
                "A computation is of a microbatch, such as 2F0. Received "
                f"{cell!r} in row {p + 1}."
            )
        yield match[2], int(match[1]), int(match[3])


def read_drawing(text: str, placement: Sequence[int] | None) -> list[list[Entry]]:
    """Returns the actions of each row of a drawing.

    Args:
        text: The output of `tfgpipe.schedules.draw`.
        placement: For each stage, the index of its device. None for stages that are
            dealt round robin.

    Raises:
        ValueError: If a row or a cell is of another form.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    rows = []
    for p, line in enumerate(lines):
        match = _DRAWN_ROW.fullmatch(line)
        if match is None or int(match[1]) != p:
            raise ValueError(
                "A drawing has a row for each device, such as `stage 0  F0 .. B0`, in "
                f"their order. Received {line!r} as row {p}."
            )
        cells = [cell for cell in match[2].split() if cell.strip(".")]
        rows.append([_drawn_cell(p, cell, len(lines), placement) for cell in cells])
    return _resolve(rows)


def _drawn_cell(
    p: int, cell: str, num_devices: int, placement: Sequence[int] | None
) -> _Cell:
    """Returns the letter, stage and microbatch of a cell of device p."""
    match = _DRAWN_CELL.fullmatch(cell)
    rank = ord(match[3]) - ord("a") if match and match[3] else 0
    stages: Sequence[int] = range(p, 26 * num_devices, num_devices)
    if placement is not None:
        stages = [k for k, device in enumerate(placement) if device == p]
    if match is None or match[1] not in _KINDS or rank >= len(stages):
        raise ValueError(
            "A cell of a drawing is a letter, F, B or W, a microbatch, and a small "
            f"letter for one of several stages, such as F0b. Received {cell!r} on "
            f"device {p}, which has {len(stages)} stages."
        )
    return match[1], stages[rank], int(match[2])


def _resolve(rows: list[list[_Cell]]) -> list[list[Entry]]:
    """Returns the kinds of letters: `B` with a `W` of its own is the half of one."""
    split = {(k, m) for row in rows for letter, k, m in row if letter == "W"}

    def kind(letter: str, k: int, m: int) -> ActionKind:
        return BACKWARD_INPUT if letter == "B" and (k, m) in split else _KINDS[letter]

    return [[(kind(*cell), *cell[1:]) for cell in row] for row in rows]
