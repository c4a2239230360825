"""The command lines, made from what the programs print with `--help`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Programs that users run, in the order of the page, and the page that explains each.
PROGRAMS = {
    "trainer": "how-to/training.md",
    "trainer.plan": "how-to/planner.md",
    "tfgpipe.planner": "how-to/planner.md",
    "tfgpipe.cluster": "how-to/hosts.md",
}
_SUBCOMMANDS = re.compile(r"^usage:.*\{([\w,]+)\} \.\.\.$", re.MULTILINE)


def sections() -> str:
    """Returns a section for each program as Markdown."""
    return "\n\n".join(part for name in PROGRAMS for part in _section(name)) + "\n"


def _section(name: str) -> Iterator[str]:
    yield f"## python -m {name}"
    yield f"Explained in [{PROGRAMS[name]}](../{PROGRAMS[name]})."
    text = help_text(name)
    yield f"```text\n{text}\n```"
    for subcommand in subcommands(text):
        yield f"### python -m {name} {subcommand}"
        yield f"```text\n{help_text(name, subcommand)}\n```"


def subcommands(text: str) -> list[str]:
    """Returns the names of the subcommands that a help text has, if any.

    >>> subcommands("usage: python -m tool [-h] {start,stop} ...")
    ['start', 'stop']
    """
    found = _SUBCOMMANDS.search(text)
    return found[1].split(",") if found else []


def help_text(name: str, *subcommand: str) -> str:
    """Returns what a program prints with `--help`.

    Args:
        name: The module, as after `python -m`.
        *subcommand: One of its subcommands, or nothing.

    Raises:
        subprocess.CalledProcessError: If the program fails.
    """
    run = subprocess.run(
        [sys.executable, "-m", name, *subcommand, "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "88"},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.strip()
