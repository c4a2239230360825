"""Examples: what the docstring of each promises, and what it prints."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from pathlib import Path

from tests.helpers import fresh_processes
from tests.helpers.subprocesses import ROOT

FOLDER = ROOT / "examples"
EXAMPLES = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}

_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
# What is left on standard output is the example's.
_WITHOUT_STDERR = "import os\nos.dup2(os.open('stderr', os.O_CREAT | os.O_WRONLY), 2)\n"


def docstring(name: str) -> str:
    """Returns the docstring of an example."""
    return ast.get_docstring(ast.parse(EXAMPLES[name].read_text("utf-8"))) or ""


def indented_blocks(name: str) -> list[list[str]]:
    """Returns the indented lines of its docstring: the command, and what it prints."""
    blocks = re.findall(r"(?:^    .*\n?)+", docstring(name), re.MULTILINE)
    return [[line[4:] for line in block.splitlines()] for block in blocks]


def assert_prints_what_it_promises(name: str, folder: Path) -> None:
    """Runs an example in a folder, and compares its last lines with its docstring's."""
    program = _WITHOUT_STDERR + EXAMPLES[name].read_text("utf-8")
    run = fresh_processes.run(program, cwd=folder)
    assert run.returncode == 0, (folder / "stderr").read_text(errors="replace")
    assert_ends_like(indented_blocks(name)[1], run.output)


def assert_ends_like(promised: Sequence[str], printed: str) -> None:
    """Compares the last lines of a text, but for spaces.

    Numbers from 100, and those with a decimal point, may differ by 5%, or by a unit of
    the last digit: floats differ between machines. All others are the same.
    """
    received = printed.splitlines()[-len(promised) :]
    assert len(received) == len(promised), printed
    for a, b in zip(promised, received, strict=True):
        texts = (" ".join(_NUMBER.sub("#", line).split()) for line in (a, b))
        pairs = zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=False)
        alike = len(set(texts)) == 1 and all(_is_close(*pair) for pair in pairs)
        assert alike, f"promised {a!r}, printed {b!r}"


def _is_close(promised: str, printed: str) -> bool:
    expected, received = (float(x.replace(",", "")) for x in (promised, printed))
    _, point, decimals = promised.partition(".")
    if not point and expected < 100:
        return received == expected
    unit = 1.001 * 10.0 ** -len(decimals)
    return math.isclose(received, expected, rel_tol=0.05, abs_tol=unit)
