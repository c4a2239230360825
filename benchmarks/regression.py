"""Overhead of short steps and retraces, beside the last result of the same machine.

    python -m benchmarks.regression           a minute; continuous integration prints it
    python -m benchmarks.regression --keep    also writes the result, to be committed

Times are of those of plain Keras in the same turns, so that two results compare. On a
busy machine they are less sure, and nothing fails by them. Retraces are counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from pathlib import Path

from benchmarks import overhead, retraces, tables
from benchmarks.peers import report

RESULTS = Path(__file__).parent / "results" / "regression"
CASES = ("fit", "train_on_batch", "predict_on_batch")


def measure() -> dict[str, float]:
    """Returns ratios of step times and counts of traces, by what they are of."""
    found: dict[str, float] = {}
    models = overhead.models(num_metrics=0)
    for name in CASES:
        _, run = overhead.CASES[name]
        row = overhead.measure(name, run, models, steps=150, turns=7)
        found |= {
            f"{name}, {column.removeprefix('ratio ')}: of plain Keras": round(value, 3)
            for column, value in row.items()
            if column.startswith("ratio")
        }
    for fit in (True, False):
        row = retraces.measure(pipelined=True, fit=fit, num_lengths=20)
        found[f"traces of twenty lengths, {row['by']}"] = row["calls"]
    return found


def newest(machine: str, folder: Path = RESULTS) -> tuple[str, dict[str, float]]:
    """Returns the commit and the numbers of the last result of a machine, if any."""
    results = [json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")]
    results = [each for each in results if each["machine"] == machine]
    if not results:
        return "none", {}
    last = max(results, key=lambda each: each["date"])
    return last["commit"], last["found"]


def main() -> None:
    """Measures, prints, and writes the result if that is asked for."""
    parser = argparse.ArgumentParser(description="Overhead and retraces.")
    parser.add_argument("--keep", action="store_true", help="write the result")
    flags = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    import tfgpipe

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tfgpipe.make_logical_cpus(2)
    machine = report.machine()
    commit, before = newest(machine)
    found = measure()
    rows: list[tables.Row] = [
        {"": name, "now": value, f"last ({commit})": before.get(name, "")}
        for name, value in found.items()
    ]
    print(f"{machine}\n{tables.draw(rows)}")
    if flags.keep:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
        result = {"date": date, "commit": report.commit(), "machine": machine}
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{date.replace(' ', '-').replace(':', '')}.json"
        text = json.dumps({**result, "found": found}, indent=1)
        path.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
