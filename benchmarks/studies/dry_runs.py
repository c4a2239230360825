"""The compilers of GPUs and TPUs take all stage functions they had the time for.

Dry runs of experiments: what their steps would do on GPUs and TPUs not here.

    python -m benchmarks.studies.dry_runs --platforms=h100-80g lm.Tiny image.Digits
    python -m benchmarks.studies.dry_runs --platforms=all --compile lm.Tiny
    python -m benchmarks.studies.dry_runs --compile \
        --set=pipelining.num_microbatches=8 --each=pipelining.remat=layer,none \
        benchmarks.studies.experiments.Encoder

Without names, all experiments that train on two CPU cores. A row for each experiment
and platform: operations that run on the host for want of a kernel; copies between the
host and GPUs in the loop over microbatches, and those that the host waits for; bytes of
all other copies of a step; with `--compile`, which needs `tfgpipe[compilers]`, how many
stage functions and updates compile, their seconds, the most that one needs beside its
arguments, and of the forwards and backwards of a step the roofline time, of the device
that has most, and the planner's. Rows are printed as they are found; then, compiled, a
table with a column for each platform. Each experiment is a process of its own, traced
once for GPUs and once for TPUs, and given up after `--limit` seconds.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

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
    "parallelism.DataPipelineTensor",
    "segmentation.UNet",
    "template.Mine",
    "translate.Reversal",
    "translate.Dates",
    "variants.SubclassedModel",
)


def measure(
    name: str, platforms: Sequence[str], *, settings: Sequence[str], compiles: bool
) -> Iterator[tables.Row]:
    """Yields the rows of an experiment, of which some hyperparameters are changed."""
    from tfgpipe_trainer import devices, hyperparams
    from tfgpipe_trainer.experiment import find

    experiment = hyperparams.override(find(name)(), settings)
    with contextlib.redirect_stdout(io.StringIO()):
        devices.start_tensorflow(experiment.pipelining, device="cpu")
    from tfgpipe.accelerators import dry_runs
    from tfgpipe_trainer.train import build

    with contextlib.redirect_stdout(io.StringIO()):
        model = build(experiment, devices.scope(experiment.pipelining))
    batch = experiment.batches("train").element_spec
    reports = dry_runs(
        model,
        batch=batch,
        platforms=[PLATFORMS[platform] for platform in platforms],
        compiles=compiles,
    )
    for report in reports:
        yield {
            "experiment": name,
            "settings": " ".join(settings),
            "platform": report.platform.name,
            **_row(report, compiles=compiles),
        }


def _row(report: DryRun, *, compiles: bool) -> tables.Row:
    from tfgpipe.accelerators import HOST

    loop = [x for x in report.transfers if x.in_loop]
    host = [x for x in loop if HOST in (x.source, x.target)]
    across = [x for x in report.transfers if x not in host]
    row: tables.Row = {
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


def _measure(
    rows: Connection,
    name: str,
    platforms: Sequence[str],
    settings: Sequence[str],
    compiles: bool,
) -> None:
    """Sends the rows of an experiment to another process."""
    for row in measure(name, platforms, settings=settings, compiles=compiles):
        rows.send(row)


def _rows(
    name: str,
    platforms: Sequence[str],
    *,
    settings: Sequence[str],
    compiles: bool,
    limit: float,
) -> Iterator[tables.Row]:
    """Yields the rows of an experiment, found in a process of its own.

    If GPUs or TPUs are what it cannot do, another process goes on with the others.
    """
    context = multiprocessing.get_context("spawn")
    missing = list(platforms)
    while missing:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_measure, args=(theirs, name, missing, settings, compiles)
        )
        process.start()
        theirs.close()
        ends = time.perf_counter() + limit
        why = "has failed"
        with contextlib.suppress(EOFError):
            while missing:
                if not ours.poll(max(ends - time.perf_counter(), 0.0)):
                    why = f"took more than {limit:g} seconds"
                    break
                yield ours.recv()
                missing.pop(0)
        process.kill()
        process.join()
        if missing:
            kind = PLATFORMS[missing[0]].kind
            left = [x for x in missing if PLATFORMS[x].kind == kind]
            words = [name, *settings, "on", ", ".join(left), why]
            print(*words, file=sys.stderr, flush=True)
            missing = [x for x in missing if x not in left]


def summary(rows: Sequence[tables.Row]) -> list[tables.Row]:
    """Returns how much of each experiment compiles, a column for each platform.

    Args:
        rows: Those of `measure`, compiled.
    """
    platforms = [x for x in PLATFORMS if any(row["platform"] == x for row in rows)]
    found: dict[tuple[str, str], tables.Row] = {}
    for row in rows:
        names = {key: row[key] for key in ("experiment", "settings")}
        empty = names | dict.fromkeys(platforms, "-")
        found.setdefault(tuple(names.values()), empty)[row["platform"]] = row[
            "compiled"
        ]
    return list(found.values())


def _settings(always: Sequence[str], each: Sequence[str]) -> list[list[str]]:
    """Returns the settings of each run: those of all, and one of each list.

    >>> _settings(["a=1"], ["b.c=2,3"])
    [['a=1', 'b.c=2'], ['a=1', 'b.c=3']]
    """
    lists = []
    for text in each:
        name, _, values = text.partition("=")
        lists.append([f"{name}={value}" for value in values.split(",")])
    return [[*always, *chosen] for chosen in itertools.product(*lists)]


def main() -> None:
    """Prints a row for each experiment and platform."""
    parser = argparse.ArgumentParser(description="Dry runs of experiments.")
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", default=NAMES)
    parser.add_argument(
        "--platforms",
        type=lambda text: list(PLATFORMS) if text == "all" else text.split(","),
        default=["h100-80g"],
        metavar="NAME,...",
        help=f"all, or of {', '.join(PLATFORMS)}",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        help="change a hyperparameter, as pipelining.schedule=gpipe; repeatable",
    )
    parser.add_argument(
        "--each",
        action="append",
        default=[],
        metavar="A.B=C,D",
        help="a run with each of these values; repeatable",
    )
    parser.add_argument("--compile", action="store_true", help="compile functions")
    parser.add_argument(
        "--limit",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="give an experiment up after so long",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    flags = parser.parse_args()
    rows: list[tables.Row] = []
    for name, settings in itertools.product(
        flags.names, _settings(flags.set, flags.each)
    ):
        for row in _rows(
            name,
            flags.platforms,
            settings=settings,
            compiles=flags.compile,
            limit=flags.limit,
        ):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if rows:
        print(tables.draw(rows))
    if rows and flags.compile:
        print(tables.draw_markdown(summary(rows)))
    if flags.json:
        tables.write_json(flags.json, rows)


if __name__ == "__main__":
    main()
