"""Time, start-up, memory and graph grow no faster than linearly in M, K and depth.

How step time, start-up, memory and the graph grow with M, K and depth.

    python -m benchmarks.studies.growth --json=benchmarks/studies/growth.json
    python -m docs.pictures growth

Narrow transformer blocks on short sequences, so that the overhead of the pipeline shows
rather than arithmetic; one of M, K and the number of blocks varies at a time. The other
command draws what the first has measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks import tables
from benchmarks.worker import Side, Worker
from tfgpipe.report import SERIES

MIB = 2**20
# For each quantity that varies, its values, and those of the others.
AXES: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "M": ((1, 2, 4, 8, 16, 32, 64), {"K": 2, "blocks": 8}),
    "K": ((1, 2, 4, 8), {"M": 8, "blocks": 8}),
    "blocks": ((8, 16, 32, 64), {"M": 8, "K": 4}),
}
# What is drawn of a row, and what to call it.
DRAWN = {
    "step ms": "step, ms",
    "start-up s": "start-up, s",
    "step MiB": "memory of a step, MiB",
    "nodes": "nodes of the step's graph",
}


def measure(*, M: int, K: int, blocks: int, steps: int = 10) -> tables.Row:
    """Measures one pipeline, in its own process."""
    side = Side(
        workload="transformer",
        sizes={"num_layers": blocks, "batch_size": 64, "length": 16, "d_model": 64},
        num_stages=K,
        num_microbatches=M,
        schedule="1f1b" if M >= K else "gpipe",
        remat="stage",
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )
    with Worker(side) as worker:
        first = worker.step().seconds
        seconds = [worker.step().seconds for _ in range(steps)]
        graph = worker.graph()
    with Worker(side, for_memory=True) as other:
        memory = other.memory()
    return {
        "M": M,
        "K": K,
        "blocks": blocks,
        "step ms": 1e3 * float(np.median(seconds)),
        "start-up s": worker.build_seconds + first,
        "step MiB": (memory.peak - memory.before) / MIB,
        "nodes": graph.num_nodes,
        "function nodes": graph.num_function_nodes,
    }


def main() -> None:
    """Measures all curves, and prints them and by how much each quantity grows."""
    parser = argparse.ArgumentParser(description="Measures growth with M, K and depth.")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    flags = parser.parse_args()
    curves: dict[str, list[tables.Row]] = {}
    for axis, (values, others) in AXES.items():
        curves[axis] = []
        for value in values:
            curves[axis].append(measure(**{axis: value, **others}))
            print(tables.draw(curves[axis][-1:]), flush=True)
        print(tables.draw(curves[axis]), flush=True)
    if flags.json:
        Path(flags.json).write_text(json.dumps(curves, indent=1) + "\n", "utf-8")


def draw(
    curves: Mapping[str, Sequence[tables.Row]], path: str | os.PathLike[str]
) -> None:
    """Draws each quantity over M, K and depth.

    Args:
        curves: What `main` writes as JSON.
        path: Where to write the picture.
    """
    from matplotlib.figure import Figure

    titles = {"M": "microbatches M", "K": "stages K", "blocks": "transformer blocks"}
    figure = Figure(figsize=(8.2, 8.2), layout="constrained")
    panels = figure.subplots(len(DRAWN), len(curves), sharex="col", sharey="row")
    for column, (axis, rows) in enumerate(curves.items()):
        x = np.array([row[axis] for row in rows])
        for line, (quantity, title) in enumerate(DRAWN.items()):
            panel = panels[line][column]
            y = np.array([row[quantity] for row in rows])
            panel.loglog(x, y, "o-", color=SERIES[0], ms=4, base=2)
            # What grows in proportion, from the first value on.
            panel.loglog(x, y[0] * x / x[0], ":", color="#999999", base=2)
            panel.set_xticks(x, [str(value) for value in x])
            panel.minorticks_off()
            panel.grid(color="#DDDDDD")
            panel.set_axisbelow(True)
            panel.tick_params(labelsize=8)
            panel.spines[["top", "right"]].set_visible(False)
            if column == 0:
                panel.set_ylabel(title, fontsize=8)
    for (axis, (_, others)), panel in zip(AXES.items(), panels[-1], strict=True):
        fixed = ", ".join(f"{name}={value}" for name, value in others.items())
        panel.set_xlabel(f"{titles[axis]}\n({fixed})", fontsize=8)
    for line, quantity in enumerate(DRAWN):
        every = [row[quantity] for rows in curves.values() for row in rows]
        ticks = round_ticks(min(every), max(every))
        panels[line][0].set_ylim(0.8 * min(every), 1.25 * max(every))
        panels[line][0].set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    figure.suptitle(
        "Growth with microbatches, stages and depth",
        x=0.01,
        ha="left",
        fontsize=10,
        fontweight="bold",
    )
    figure.supxlabel("dotted: in proportion to the first value", fontsize=8)
    figure.savefig(path, dpi=150)


def round_ticks(least: float, most: float) -> list[int]:
    """Returns round values in a range, at most five of them: 1, 2, 5, 10 and so on.

    >>> round_ticks(120, 1600)
    [200, 500, 1000]
    >>> round_ticks(8, 120)
    [10, 20, 50, 100]
    """
    powers = [10**power for power in range(math.ceil(math.log10(most)) + 1)]
    ticks = [n * power for power in powers for n in (1, 2, 5)]
    ticks = [tick for tick in ticks if least <= tick <= most]
    return ticks if len(ticks) <= 5 else [tick for tick in ticks if tick in powers]


if __name__ == "__main__":
    main()
