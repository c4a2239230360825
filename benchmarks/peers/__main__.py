"""Measures what the flags describe: see `benchmarks.peers`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import tables
from benchmarks.peers import environments, report, turns


def _commas(text: str) -> list[str]:
    return text.split(",")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags, or those of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Measures this library beside others.",
    )
    parser.add_argument(
        "--workloads", type=_commas, default=["mlp", "transformer"], help="with commas"
    )
    parser.add_argument("--stages", type=int, default=2, help="K")
    parser.add_argument(
        "--microbatches",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[8],
        help="values of M, with commas",
    )
    parser.add_argument(
        "--schedules", type=_commas, default=["gpipe", "1f1b"], help="with commas"
    )
    parser.add_argument(
        "--remat", type=_commas, default=["none"], help="none, stage, or both"
    )
    parser.add_argument(
        "--environments",
        metavar="DIR",
        type=Path,
        help="where `python -m benchmarks.peers.environments DIR` made them",
    )
    for name in environments.PEERS:
        parser.add_argument(
            f"--{name}", metavar="PYTHON", help="of an environment with it"
        )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--small", action="store_true", help="only to see whether losses agree"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    parser.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="also write tables there, in place of those that are",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the flags describe and prints a table of each comparison."""
    flags = parse(arguments)
    given = {name: getattr(flags, name) for name in environments.PEERS}
    pythons = environments.find(
        flags.environments, {name: path for name, path in given.items() if path}
    )
    skipped = {n: environments.missing(n, pythons.get(n)) for n in environments.PEERS}
    notes = [reason for reason in skipped.values() if reason is not None]
    print(*notes, sep="\n", flush=True)
    rows: list[tables.Row] = []
    versions = report.our_versions()
    others: list[float] = []
    for workload in flags.workloads:
        for remat in flags.remat:
            for num_microbatches in flags.microbatches:
                found = turns.measure(
                    workload,
                    num_microbatches=num_microbatches,
                    schedules=flags.schedules,
                    pythons={n: pythons[n] for n in pythons if skipped[n] is None},
                    steps=flags.steps,
                    num_stages=flags.stages,
                    remat=remat,
                    sizes=turns.SMALL[workload] if flags.small else None,
                )
                print(tables.draw(found.rows), flush=True)
                rows += found.rows
                versions |= found.versions
                others.append(found.others)
                busy = (
                    f"Medians of {flags.steps} steps. Other work took "
                    f"{min(others):.0%} to {max(others):.0%} of the cores."
                )
                print(busy, flush=True)
                # After each, since what comes may take long.
                if flags.json:
                    tables.write_json(flags.json, rows)
                if flags.report:
                    text = report.section(
                        rows,
                        machine=report.machine(),
                        versions=versions,
                        notes=[busy, *notes],
                    )
                    report.put(flags.report, text)


if __name__ == "__main__":
    main()
