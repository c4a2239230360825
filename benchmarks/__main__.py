"""The one benchmark: five workloads beside torch, JAX and plain Keras, on this machine.

    python -m benchmarks            measures, in 20 to 30 minutes on two cores
    python -m benchmarks --pages    writes the newest quiet result into the documents

Every side trains the same model from the same weights, a stage on a core, and all take
turns step by step: what else the machine does hits all of them alike. Each library is
run as it is installed and at its best: plain Keras also with XLA, torch also with
`torch.compile` on the whole model and on each stage. A side whose losses are others has
no time. Environments of torch and JAX are made in `.bench/` the first time, by pip, to
which `PIP_EXTRA_INDEX_URL` may name an index of a torch without CUDA.

A result is a file of JSON in `benchmarks/results/`: machine, processor flags, versions,
commit, the share of the cores that other work took, and a row for each side. One with
at most a tenth of that is quiet; `--pages` puts the newest of those into
`docs/explanation/comparison.md`, and into the picture that it and README have.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.peers import environments, report, turns

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ENVIRONMENTS = ROOT / ".bench"
PAGES = (ROOT / "docs" / "explanation" / "comparison.md",)
BEGIN, END = "<!-- python -m benchmarks --pages -->\n", "<!-- end -->\n"
# The most that other work may take of the cores.
QUIET = 0.1
# Titles of workloads, in the order of tables.
WORKLOADS = {
    "mlp": "16 dense layers of 1024",
    "transformer": "8 transformer blocks of width 256",
    "decoder": "decoder with dropout",
    "resnet50": "ResNet-50",
    "translation": "encoder and decoder",
}
PEERS = ("torch", "jax")
# Sides of each kind, of which the best is shown.
_KINDS = {
    "plain Keras": ("tfgpipe plain",),
    "plain Keras, XLA": ("tfgpipe plain XLA",),
    "tfgpipe": ("tfgpipe gpipe", "tfgpipe 1f1b"),
    "plain torch": ("torch plain", "torch plain compiled"),
    "torch": ("torch gpipe", "torch 1f1b"),
    "torch, compiled": ("torch gpipe compiled", "torch 1f1b compiled"),
    "JAX": ("jax gpipe",),
}
# Of a bar in the picture; higher ones say how high.
_HIGHEST = 1.8
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def measure(names: Sequence[str], steps: int, *, small: bool) -> dict[str, Any]:
    """Returns a result.

    Args:
        names: The workloads.
        steps: Number of timed steps.
        small: True for small sizes, whose times mean nothing.
    """
    pythons = _pythons()
    rows: list[tables.Row] = []
    versions, others = report.our_versions(), {}
    for name in names:
        started = time.monotonic()
        found = turns.measure(
            name,
            num_microbatches=8,
            schedules=("gpipe", "1f1b"),
            pythons=pythons,
            steps=steps,
            compiled=True,
            sizes=turns.SMALL[name] if small else None,
        )
        rows += found.rows
        versions |= found.versions
        others[name] = found.others
        print(tables.draw(found.rows))
        seconds = time.monotonic() - started
        busy = f"{found.others:.0%} of the cores"
        print(f"{seconds:.0f} s; other work took {busy}.\n", flush=True)
    text = Path("/proc/cpuinfo").read_text("utf-8")
    known = set(re.findall(r"\w+", text.partition("flags")[2].partition("\n")[0]))
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": report.commit(),
        "machine": report.machine(),
        "flags": [flag for flag in _FLAGS if flag in known],
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1"),
        "versions": versions,
        "steps": steps,
        "others": others,
        "rows": rows,
    }


def _pythons() -> dict[str, str]:
    """Returns the Pythons of the peers, whose environments are made if they are not."""
    found = environments.find(ENVIRONMENTS, {})
    for name in PEERS:
        if environments.missing(name, found[name]) is not None:
            print(f"Making {ENVIRONMENTS / name}.", flush=True)
            environments.make(ENVIRONMENTS, name)
    return {name: found[name] for name in PEERS}


def newest(folder: Path = RESULTS) -> dict[str, Any]:
    """Returns the newest result of all workloads during which the machine was quiet.

    Raises:
        FileNotFoundError: If there is none.
    """
    results = [json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")]
    quiet = [
        each
        for each in results
        if each["others"].keys() >= WORKLOADS.keys()
        and max(each["others"].values()) <= QUIET
        and all(isinstance(row["ms"], float) for row in each["rows"])
    ]
    if not quiet:
        raise FileNotFoundError(
            f"No result of all workloads on a quiet machine in {folder}: "
            "`python -m benchmarks` makes one."
        )
    return max(quiet, key=lambda each: each["date"])


def best(rows: Sequence[Mapping[str, Any]], workload: str) -> dict[str, float]:
    """Returns the milliseconds of each kind of side, of its best schedule.

    Args:
        rows: Those of a result.
        workload: Its name.
    """
    ms = {
        row["side"]: row["ms"]
        for row in rows
        if row["workload"] == workload and isinstance(row["ms"], float)
    }
    found = {
        kind: [ms[side] for side in sides if side in ms]
        for kind, sides in _KINDS.items()
    }
    return {kind: min(times) for kind, times in found.items() if times}


def section(result: Mapping[str, Any]) -> str:
    """Returns the table of a result for the documents."""
    rows = []
    for workload, title in WORKLOADS.items():
        ms = best(result["rows"], workload)
        theirs = [
            ms[kind] for kind in ("torch", "torch, compiled", "JAX") if kind in ms
        ]
        row = {"ms a step": title}
        for kind in _KINDS:
            row[kind] = f"{ms[kind]:.0f}" if kind in ms else ""
        row["÷ best other pipeline"] = f"{ms['tfgpipe'] / min(theirs):.2f}"
        rows.append(row)
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    about = (
        f"{result['machine']} ({', '.join(result['flags'])}), {result['date']}, commit "
        f"{result['commit']}; {versions}. K=2, M=8, a core a stage; medians of "
        f"{result['steps']} steps in turns, of each library's best schedule."
    )
    return f"{tables.draw_markdown(rows)}\n\n{about}\n"


def write_pages(result: Mapping[str, Any]) -> None:
    """Writes a result into the documents, between the marks."""
    for path in PAGES:
        text = path.read_text("utf-8")
        head, begin, rest = text.partition(BEGIN)
        _, end, tail = rest.partition(END)
        if not (begin and end):
            raise ValueError(f"Expected {BEGIN.strip()} and {END.strip()} in {path}.")
        path.write_text(f"{head}{begin}\n{section(result)}\n{end}{tail}", "utf-8")


def draw(path: Path) -> None:
    """Draws the newest quiet result: steps of each library, of plain Keras' step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    result = newest()
    kinds = ("plain Keras, XLA", "torch", "torch, compiled", "JAX", "tfgpipe")
    colors = ("#bbbbbb", "#f4a582", "#d6604d", "#92c5de", "#2166ac")
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    width = 0.8 / len(kinds)
    for place, workload in enumerate(WORKLOADS):
        ms = best(result["rows"], workload)
        for index, (kind, color) in enumerate(zip(kinds, colors, strict=True)):
            if kind not in ms:
                continue
            x = place + (index - (len(kinds) - 1) / 2) * width
            height = ms[kind] / ms["plain Keras"]
            label = kind if place == 0 else None
            axes.bar(x, min(height, _HIGHEST), width, color=color, label=label)
            if height > _HIGHEST:
                axes.text(
                    x, _HIGHEST, f"{height:.1f}", ha="center", va="bottom", size=7
                )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(WORKLOADS)), list(WORKLOADS))
    axes.set_ylabel("time of a step,\nof plain Keras on one core")
    figure.legend(ncols=len(kinds), fontsize=8, loc="outside upper center")
    axes.set_ylim(0, 1.05 * _HIGHEST)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Measures, or writes the newest result into the documents."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures steps beside torch, JAX and plain Keras.",
    )
    parser.add_argument(
        "--workloads",
        type=lambda text: text.split(","),
        default=list(WORKLOADS),
        help=f"some of {', '.join(WORKLOADS)}, with commas",
    )
    parser.add_argument("--steps", type=int, default=6, help="timed steps (6)")
    parser.add_argument("--small", action="store_true", help="compare losses only")
    parser.add_argument("--pages", action="store_true", help="write the documents")
    flags = parser.parse_args()
    if flags.pages:
        write_pages(newest())
        draw(ROOT / "docs" / "assets" / "speed.png")
        return
    if unknown := set(flags.workloads) - WORKLOADS.keys():
        parser.error(f"unknown workloads: {', '.join(sorted(unknown))}")
    started = time.monotonic()
    result = measure(flags.workloads, flags.steps, small=flags.small)
    if not flags.small:
        RESULTS.mkdir(exist_ok=True)
        stamp = result["date"].replace(" ", "-").replace(":", "")
        path = RESULTS / f"{stamp}-{result['commit']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        print(f"{path}, after {(time.monotonic() - started) / 60:.0f} minutes")
    if any(row["ms"] == "losses differ" for row in result["rows"]):
        sys.exit("Losses of a side differ: see above.")


if __name__ == "__main__":
    main()
