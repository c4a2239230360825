"""`"auto"` recomputes less than half as much as `"stage"`, in the same memory.

Activations that a device holds, and FLOPs that are computed again for it.

    python -m benchmarks.studies.rematerialization [--workloads=transformer,decoder]
        [--devices=2,4] [--microbatches=8] [--picture=FILE]

By 1F1B, from the stages' traces: for each policy the bytes of the fullest device, that
is what is saved of the microbatches in flight and the most that one backward
recomputes; and the FLOPs that backwards recompute, beside those of `"stage"`. `auto`
has the bytes that `"stage"` takes; the lines of the picture give it more and fewer.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

import tfgpipe
from benchmarks import tables, workloads
from tfgpipe import remat as remats
from tfgpipe._util import stage_spans
from tfgpipe.capture import TensorKey
from tfgpipe.costs import SegmentProfiler
from tfgpipe.graph import flops
from tfgpipe.remat import DeviceStages, Remat
from tfgpipe.report import SERIES
from tfgpipe.runtime import device_stages
from tfgpipe.stage import TracedStage

MIB = 2**20
NAMED: tuple[remats.Name, ...] = ("stage", "products", "auto", "none")


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The traced stages of a workload.

    Attributes:
        traced: The stages.
        devices: What the stages of each device hold beside weights.
    """

    traced: Sequence[TracedStage]
    devices: Sequence[DeviceStages]

    def held(self, policies: Sequence[Remat]) -> float:
        """Returns the bytes of activations on the fullest device."""
        totals = []
        for device in self.devices:
            kept, again = 0.0, []
            for k, graph in device.graphs.items():
                saved = policies[k].saved(graph)
                kept += device.in_flight[k] * sum(graph.sizes[x] for x in saved)
                again.append(graph.peak_bytes(saved))
            totals.append(kept + max(again))
        return max(totals)

    def flops(self, policies: Sequence[Remat]) -> float:
        """Returns the FLOPs of one microbatch that backwards recompute."""
        return sum(
            flops.count(stage.trace.graph, stage.saving(policy).recomputed_ops)
            for stage, policy in zip(self.traced, policies, strict=True)
        )

    def policies(self, policy: Remat) -> Sequence[Remat]:
        """Returns the policy of each stage; `"none"` saves what it can."""
        if policy.keeps_all:
            policy = remats.AutoRemat(flops_per_byte=0)
        return policy.for_stages(len(self.traced), lambda: self.devices)


def trace(name: str, num_devices: int, num_microbatches: int) -> Pipeline:
    """Returns a workload in stages, one on each device, by 1F1B."""
    workload = workloads.WORKLOADS[name]()
    layers = workload.make_layers()
    ends = workload.stage_ends(layers, num_devices)
    model = tfgpipe.pipeline(
        workload.make_model(layers),
        num_stages=num_devices,
        num_microbatches=num_microbatches,
        schedule="1f1b",
        partition=ends,
    )
    pipeline, x = model.pipelined.pipeline, workload.make_data()[0]
    given = tf.TensorSpec([len(x) // num_microbatches, *x.shape[1:]], x.dtype)
    spans = stage_spans([len(stage.segment.calls) for stage in pipeline.stages])
    traced = SegmentProfiler(pipeline.captured.graph, spans, {TensorKey(0): given})
    devices = device_stages(
        pipeline.stages, traced.traced, model.schedule, sizes_known=True
    )
    return Pipeline(
        traced.traced, [dataclasses.replace(x, fixed_bytes=0.0) for x in devices]
    )


def measure(pipeline: Pipeline) -> list[tables.Row]:
    """Returns the bytes and FLOPs of each policy."""
    stage = pipeline.flops(pipeline.policies(remats.find("stage")))
    rows = []
    for name in NAMED:
        policies = pipeline.policies(remats.find(name))
        rows.append(
            {
                "remat": name,
                "MiB": pipeline.held(policies) / MIB,
                "FLOPs again, %": 100 * pipeline.flops(policies) / stage,
            }
        )
    return rows


def curve(pipeline: Pipeline, *, points: int = 24) -> list[tuple[float, float]]:
    """Returns bytes and recomputed FLOPs of `"auto"` within more and more memory."""
    stage = pipeline.policies(remats.find("stage"))
    whole = pipeline.flops(stage)
    most = pipeline.held(pipeline.policies(remats.find("none")))
    found = []
    for limit in np.geomspace(most, most / 100, points):
        try:
            auto = remats.AutoRemat(memory_limit=float(limit))
            policies = pipeline.policies(auto)
        except ValueError:  # Not even with as little saved as can be.
            break
        found.append((pipeline.held(policies) / MIB, pipeline.flops(policies) / whole))
    return found


def draw(
    drawn: dict[str, tuple[list[tables.Row], list[tuple[float, float]]]],
    path: str | os.PathLike[str],
) -> None:
    """Draws recomputed FLOPs over bytes, a panel for each workload.

    Args:
        drawn: By title, the named policies and the curve of `"auto"`.
        path: Where to write the picture.
    """
    from matplotlib.figure import Figure

    rows_of_panels = -(-len(drawn) // 2)
    figure = Figure(figsize=(8.2, 3.2 * rows_of_panels), layout="constrained")
    panels = figure.subplots(rows_of_panels, 2, sharey=True, squeeze=False).flat
    for panel, (title, (rows, line)) in zip(panels, drawn.items(), strict=False):
        x, y = zip(*line, strict=True)
        panel.plot(x, [100 * v for v in y], "o-", color=SERIES[0], ms=3)
        for row in rows:
            name, at = row["remat"], (row["MiB"], row["FLOPs again, %"])
            if name != "auto":
                panel.plot(*at, "s", color=SERIES[1], ms=5)
                panel.annotate(
                    f'"{name}"', at, (5, 5), textcoords="offset points", fontsize=8
                )
        panel.axvline(rows[0]["MiB"], ls=":", color="#999999")
        panel.set_title(title, fontsize=9, loc="left")
        panel.set_xlabel("MiB of activations, fullest device", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.grid(color="#DDDDDD")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_ylabel('FLOPs again, % of "stage"', fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Prints a table for each workload and number of devices, and draws the curves."""
    parser = argparse.ArgumentParser(description="Compares rematerialisation policies.")
    names: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--workloads", type=names, default=["transformer", "decoder"])
    parser.add_argument("--devices", type=names, default=["2", "4"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--picture", type=Path, help="where to draw the curves")
    flags = parser.parse_args()
    tfgpipe.make_logical_cpus(max(map(int, flags.devices)))
    drawn, M = {}, flags.microbatches
    for name in flags.workloads:
        for devices in map(int, flags.devices):
            pipeline = trace(name, devices, M)
            title = f"{name}, K={devices}, M={M}"
            rows = measure(pipeline)
            print(f"{title}\n{tables.draw(rows)}\n", flush=True)
            if flags.picture:
                drawn[title] = rows, curve(pipeline)
    if flags.picture:
        draw(drawn, flags.picture)


if __name__ == "__main__":
    main()
