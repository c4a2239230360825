"""Seconds from the trainer's command to its first step, of some experiments.

    python -m benchmarks.first_step --params=lm.Tiny --params=image.Digits --repeats=3

Alternately begins a run and resumes it from a checkpoint. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import tables


def _seconds(name: str, folder: str, *, steps: int) -> float:
    """Returns the seconds until the trainer prints the first step."""
    started = time.perf_counter()
    first = None
    process = subprocess.Popen(
        [
            *(sys.executable, "-u", "-m", "trainer", f"--params={name}"),
            *(f"--logdir={folder}", "--mode=train", "--set=training.log_every=1"),
            *(f"--set=training.num_steps={steps}", "--allow_changes"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if first is None and line.startswith("step ") and "/" in line:
            first = time.perf_counter() - started
    if process.wait() or first is None:
        raise SystemExit(f"{name} ended with status {process.returncode}.")
    return first


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", action="append", default=None)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    names = arguments.params or ["parallelism.Pipelined", "lm.Tiny"]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(arguments.repeats):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                begun = _seconds(name, folder, steps=3)
                found[name].append((begun, _seconds(name, folder, steps=6)))
    rows = []
    for name, times in found.items():
        begun, resumed = (statistics.median(each) for each in zip(*times, strict=True))
        rows.append({"experiment": name, "new run": begun, "resumed": resumed})
    print(tables.draw(rows))


if __name__ == "__main__":
    main()
