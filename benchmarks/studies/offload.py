"""Activations on the host make steps of small models some twenty times as long.

Microbatches on the host: bytes moved, bytes left on devices, and whether it pays.

    python -m benchmarks.studies.offload [--workloads=transformer,decoder] [--devices=4]
        [--microbatches=8] [--device=h100-80g]

By 1F1B, with traced layers: for each policy of rematerialisation the activations of the
fullest device, and the bytes that go to hosts in a step. `held` is measured, the most
microbatches at a time on each device in a timed step, beside those planned. `step` is
simulated, for the FLOPs and the way to the host of a device of the planner's table,
over that of 1F1B with `remat="none"`; transfers between devices are free.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import keras

import tfgpipe
from benchmarks import tables, workloads
from tfgpipe.planner import TABLE, Device
from tfgpipe.schedules import kinds

MIB = 2**20


def measure(
    name: str, num_devices: int, num_microbatches: int, device: Device
) -> list[tables.Row]:
    """Returns a row for each policy and schedule."""
    workload = workloads.WORKLOADS[name]()
    layers = workload.make_layers()
    ends = workload.stage_ends(layers, num_devices)
    x, y = workload.make_data()
    rows: list[tables.Row] = []
    first = 0.0
    for remat in ("none", "stage"):
        for schedule in ("1f1b", "1f1b+offload"):
            model = tfgpipe.pipeline(
                workload.make_model(layers),
                num_stages=num_devices,
                num_microbatches=num_microbatches,
                schedule=schedule,
                remat=remat,
                partition=ends,
            )
            costs = costs_on(device, model.plan(sample=x).costs)
            found = tfgpipe.simulate(model.schedule, costs)
            fullest = max(
                most - fixed
                for most, fixed in zip(found.peak_bytes, found.fixed_bytes, strict=True)
            )
            moved = sum(
                costs.bytes_of("kept_bytes", action.stage)
                for order in model.schedule.orders
                for action in order
                if action.kind == kinds.OFFLOAD
            )
            model.compile(keras.optimizers.SGD(1e-3), workload.loss)
            with tempfile.TemporaryDirectory() as folder:
                timed = tfgpipe.TimelineCallback(folder, steps=(1, 1))
                model.fit(x, y, len(x), epochs=2, verbose=0, callbacks=[timed])
            assert timed.timeline is not None
            rows.append(
                {
                    "schedule": schedule,
                    "remat": remat,
                    "MiB held": fullest / MIB,
                    "MiB to hosts": moved / MIB,
                    "held": ",".join(map(str, timed.timeline.peak_in_flight)),
                    "planned": ",".join(map(str, model.schedule.in_flight)),
                }
            )
            first = first or found.timeline.step_time
            rows[-1]["step"] = found.timeline.step_time / first
    return rows


def costs_on(device: Device, flops: tfgpipe.Costs) -> tfgpipe.Costs:
    """Returns the costs of FLOPs on a device."""
    rate = device.peak("float32") * device.efficiency
    changes: dict[str, Any] = {"host_bandwidth": device.host_bandwidth}
    for name in ("forward", "backward", "recompute"):
        changes[name] = [value / rate for value in getattr(flops, name)]
    return dataclasses.replace(flops, **changes)


def main() -> None:
    """Prints a table for each workload."""
    parser = argparse.ArgumentParser(description="Compares memory with offload.")
    names: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--workloads", type=names, default=["transformer", "decoder"])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--device", default="h100-80g")
    flags = parser.parse_args()
    tfgpipe.make_logical_cpus(flags.devices)
    K, M = flags.devices, flags.microbatches
    for name in flags.workloads:
        rows = measure(name, K, M, TABLE[flags.device])
        print(f"{name}, K={K}, M={M}\n{tables.draw(rows)}\n", flush=True)


if __name__ == "__main__":
    main()
