"""How step time, start-up, memory and the graph grow with M, K and depth.

    python -m benchmarks.growth --picture=benchmarks/growth.png

Narrow transformer blocks on short sequences, so that the overhead of the pipeline shows
rather than arithmetic; one quantity varies at a time. The slope of each curve is fitted
on logarithmic axes: 1.0 is linear growth, 0.0 none.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import numpy as np

from benchmarks import tables
from benchmarks.worker import Side, Worker

MIB = 2**20
# For each quantity that varies, its values, and those of the others.
AXES: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "M": ((1, 2, 4, 8, 16, 32, 64), {"K": 2, "blocks": 8}),
    "K": ((1, 2, 4, 8), {"M": 8, "blocks": 8}),
    "blocks": ((8, 16, 32, 64, 96), {"M": 8, "K": 4}),
}
QUANTITIES = ("step ms", "start-up s", "step MiB", "nodes", "function nodes")


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


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns the power with which y grows with x.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return float(np.polyfit(np.log(x), np.log(np.maximum(y, 1e-9)), 1)[0])


def main() -> None:
    """Measures all curves, prints them and their slopes, and draws them."""
    parser = argparse.ArgumentParser(description="Measures growth with M, K and depth.")
    parser.add_argument("--picture", metavar="FILE", help="draw the curves")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    flags = parser.parse_args()
    rows: list[tables.Row] = []
    curves: dict[str, list[tables.Row]] = {}
    for axis, (values, others) in AXES.items():
        curves[axis] = []
        for value in values:
            curves[axis].append(measure(**{axis: value, **others}))
            print(tables.draw(curves[axis][-1:]), flush=True)
        rows += curves[axis]
    slopes = [
        {
            "quantity": quantity,
            **{
                f"by {axis}": slope(AXES[axis][0], [row[quantity] for row in some])
                for axis, some in curves.items()
            },
        }
        for quantity in QUANTITIES
    ]
    print(tables.draw(rows), tables.draw(slopes), sep="\n\n")
    if flags.json:
        tables.write_json(flags.json, rows)
    if flags.picture:
        draw(curves, flags.picture)


def draw(curves: dict[str, list[tables.Row]], path: str) -> None:
    """Draws each quantity over M, K and depth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    titles = {"M": "microbatches M", "K": "stages K", "blocks": "transformer blocks"}
    figure, panels = plt.subplots(
        len(QUANTITIES) - 1, len(curves), figsize=(10, 10), layout="constrained"
    )
    for column, (axis, rows) in enumerate(curves.items()):
        x = [row[axis] for row in rows]
        others = AXES[axis][1]
        for line, quantity in enumerate(QUANTITIES[:-1]):
            panel = panels[line][column]
            y = [row[quantity] for row in rows]
            panel.loglog(x, y, "o-", color="#0072b2", base=2)
            panel.set_xticks(x, [str(value) for value in x])
            panel.minorticks_off()
            ticks = sorted({min(y), max(y)})
            panel.set_yticks(ticks, [f"{value:.3g}" for value in ticks])
            panel.margins(y=0.2)
            panel.grid(alpha=0.3)
            panel.set_title(f"{quantity} ~ {axis}^{slope(x, y):.2f}", fontsize=10)
            if line == len(QUANTITIES) - 2:
                fixed = ", ".join(f"{k}={v}" for k, v in others.items())
                panel.set_xlabel(f"{titles[axis]}   ({fixed})")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
