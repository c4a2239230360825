"""What a comparison came to, as the part of a document that begins at a heading.

The rest of the document stays as it is, so that what is said about figures can be
written by hand around figures that are not.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import tables

ROOT = Path(__file__).resolve().parents[2]
HEADING = "## Measured\n"


def machine() -> str:
    """Returns the kind of processor and the number of cores."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
    return f"{processor}, {os.cpu_count()} cores"


def commit() -> str:
    """Returns the commit of the checkout, `-dirty` if it is changed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def our_versions() -> dict[str, str]:
    """Returns the versions of what this library stands on."""
    return {p: importlib.metadata.version(p) for p in ("tensorflow", "keras")}


def section(
    rows: Sequence[tables.Row],
    *,
    machine: str,
    versions: Mapping[str, str],
    notes: Sequence[str],
) -> str:
    """Returns the heading, what was measured on, and a table a workload and remat.

    Args:
        rows: Those of `turns.measure`.
        machine: What was measured on.
        versions: Packages with their versions.
        notes: What else is to be known, a paragraph each.
    """
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts = [f"{machine}; {packages}.", *notes]
    groups: dict[tuple[str, str], list[tables.Row]] = {}
    for row in rows:
        groups.setdefault((row["workload"], row["remat"]), []).append(row)
    for (workload, remat), some in groups.items():
        kept = [
            {key: row[key] for key in row if key not in ("workload", "remat")}
            for row in some
        ]
        parts += [f'### {workload}, `remat="{remat}"`', tables.draw_markdown(kept)]
    return "\n".join([HEADING, "\n\n".join(parts), ""])


def put(path: Path, section: str) -> None:
    """Puts a section at the end of a document, in place of the last one."""
    text = path.read_text("utf-8") if path.exists() else ""
    path.write_text(text.partition(HEADING)[0] + section, "utf-8")
