"""What documents show runs: blocks of code, and the guide's first chapters."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from docs import render
from tests.docs.test_links import DOCUMENTS, blocks
from tests.helpers import fresh_processes

# Nothing of them is measured. `tests/nightly/test_guide.py` runs all.
CELLS = (
    "set-up",
    "stages-trained",
    "stages-on-devices",
    "plan",
    "plan-bytes",
    "microbatches",
    "microbatches-any-size",
    "schedule-text",
    "schedule-drawn",
    "schedule-formula",
    "schedules-compared",
)


def name(block: str) -> str:
    return block.strip().splitlines()[-1][:40]


def _printed(document: Path) -> dict[str, str]:
    """Returns what a document says that its blocks print, among other things."""
    fences = re.findall(
        r"^```([\w ]*)\n(.*?)^```$", document.read_text("utf-8"), re.M | re.S
    )
    pairs = itertools.pairwise(fences)
    return {
        block: printed
        for (language, block), (kind, printed) in pairs
        if (language, kind) == ("python", "text printed")
    }


PRINTED = {block: text for d in DOCUMENTS for block, text in _printed(d).items()}


def is_slow(document: Path) -> bool:
    """Returns whether `tests/nightly/test_documents.py` runs its blocks."""
    return document.name in {"int8.md", "parallelism.md"}


@pytest.mark.parametrize(
    "block",
    [b for d in DOCUMENTS if not is_slow(d) for b in blocks(d, "python")],
    ids=name,
)
def test_python_block_runs(block: str, tmp_path: Path) -> None:
    assert_block_runs(block, tmp_path)


def assert_block_runs(block: str, folder: Path) -> None:
    run = fresh_processes.run(block, cwd=folder)
    assert run.returncode == 0, run.output
    for line in PRINTED.get(block, "").splitlines():
        assert line in run.output, run.output


def test_the_first_chapters_of_the_guide_run(tmp_path: Path) -> None:
    code = {cell.id: cell.source for cell in render.read().cells}
    program = "\n".join(code[cell] for cell in CELLS)
    run = fresh_processes.run(re.sub("^%", "# %", program, flags=re.M), cwd=tmp_path)
    assert run.returncode == 0, run.output
    assert "3 examples in 8 microbatches: equal to the plain model" in run.output
