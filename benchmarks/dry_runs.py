"""Dry runs of experiments: what their steps would do on GPUs and TPUs not here.

    python -m benchmarks.dry_runs --platforms=h100-80g lm.Tiny image.Digits
    python -m benchmarks.dry_runs --platforms=h100-80g,tpu-v5e --compile lm.Tiny
    python -m benchmarks.dry_runs --set=pipelining.remat=layer \
        benchmarks.experiments.Encoder

Without names, all experiments that train on two CPU cores. A row for each experiment
and platform: operations that run on the host for want of a kernel; copies between the
host and GPUs in the loop over microbatches, and those that the host waits for; bytes of
all other copies of a step; with `--compile`, which needs `tfgpipe[compilers]`, how many
stage functions and updates compile, their seconds, the most that one needs beside its
arguments, and of the forwards and backwards of a step the roofline time, of the device
that has most, and the planner's. Each row is a process of its own.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import multiprocessing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import tables
from tfgpipe.accelerators import PLATFORMS

if TYPE_CHECKING:
    from tfgpipe.accelerators import DryRun

MIB = 2**20
NAMES = (
    "image.Digits",
    "image.DigitsQat",
    "image.AmoebaNetDSmall",
    "lm.Tiny",
    "lm.Packed",
    "parallelism.DataParallel",
    "parallelism.Pipelined",
    "parallelism.PipelinedDataParallel",
    "parallelism.TensorParallel",
    "parallelism.TensorParallelRing",
    "parallelism.AllThree",
    "segmentation.UNet",
    "template.Mine",
    "translate.Reversal",
    "translate.Dates",
    "variants.OwnClass",
)


def measure(
    name: str, platform: str, *, settings: Sequence[str], compiles: bool
) -> tables.Row:
    """Returns the row of an experiment, of which some hyperparameters are changed."""
    from tfgpipe.accelerators import HOST
    from trainer import devices, hyperparams
    from trainer.experiment import find

    experiment = hyperparams.override(find(name)(), settings)
    with contextlib.redirect_stdout(io.StringIO()):
        devices.start_tensorflow(experiment.pipelining, device="cpu")
    import tfgpipe
    from trainer.train import build

    with contextlib.redirect_stdout(io.StringIO()):
        model = build(experiment, devices.scope(experiment.pipelining))
    batch = experiment.batches("train").element_spec
    report = tfgpipe.dry_run(model, batch=batch, platform=platform, compiles=compiles)
    loop = [x for x in report.transfers if x.in_loop]
    host = [x for x in loop if HOST in (x.source, x.target)]
    across = [x for x in report.transfers if x not in host]
    row: tables.Row = {
        "experiment": name,
        "settings": " ".join(settings),
        "platform": platform,
        "no kernel": sum(report.on_host.values()),
        "copies": sum(x.count for x in host),
        "waits": sum(x.count for x in host if x.waits),
        "MiB sent": sum(x.num_bytes for x in across) / MIB,
    }
    if compiles:
        found = {each.function: each.compiled for each in report.functions}
        done = [x for x in (*found.values(), *report.updates.values()) if x is not None]
        right = [x for x in done if x.error is None]
        row |= {
            "compiled": f"{len(right)} of {len(done)}",
            "seconds": sum(x.seconds for x in right),
            "temp MiB": max((x.temp_bytes for x in right), default=0) / MIB,
            **_microseconds(report),
            "error": next((x.error for x in done if x.error), "") or "",
        }
    return row


def _microseconds(report: DryRun) -> dict[str, float]:
    """Returns the least time of a device's forwards and backwards, and the planner's.

    Of a step, on the device where the first is longest.
    """
    from tfgpipe.accelerators import roofline_seconds

    times: dict[int, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for each in report.functions:
        if each.compiled and each.planned_seconds is not None:
            least = roofline_seconds(
                each.compiled.flops,
                each.compiled.bytes_accessed,
                report.platform,
                dtype=report.dtype,
            )
            times[each.device][0] += 1e6 * each.calls * least
            times[each.device][1] += 1e6 * each.calls * each.planned_seconds
    return dict(
        zip(
            ("roofline us", "planned us"),
            max(times.values(), default=[0.0, 0.0]),
            strict=True,
        )
    )


def _measure(arguments: tuple[str, str, Sequence[str], bool]) -> tables.Row:
    name, platform, settings, compiles = arguments
    return measure(name, platform, settings=settings, compiles=compiles)


def main() -> None:
    """Prints a row for each experiment and platform."""
    parser = argparse.ArgumentParser(description="Dry runs of experiments.")
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", default=NAMES)
    parser.add_argument(
        "--platforms",
        type=lambda text: text.split(","),
        default=["h100-80g"],
        metavar="NAME,...",
        help=f"of {', '.join(PLATFORMS)}",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        help="change a hyperparameter, as pipelining.schedule=gpipe; repeatable",
    )
    parser.add_argument("--compile", action="store_true", help="compile functions")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    flags = parser.parse_args()
    rows: list[Any] = []
    context = multiprocessing.get_context("spawn")
    for name in flags.names:
        for platform in flags.platforms:
            with context.Pool(1) as pool:
                task = name, platform, flags.set, flags.compile
                (row,) = pool.map(_measure, [task])
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


if __name__ == "__main__":
    main()
