"""What documents show runs: blocks of code, and the guide's first chapters."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from docs import render
from tests.helpers import fresh_processes
from tests.helpers.documents import DOCUMENTS, blocks
from tests.helpers.marks import nightly

# Nothing of them is measured. `tests/docs/test_guide.py` runs all.
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


SLOW = {"int8.md", "parallelism.md"}
BLOCKS = [block for d in DOCUMENTS for block in blocks(d, "python")]
GATE = [b for d in DOCUMENTS if d.name not in SLOW for b in blocks(d, "python")]


@pytest.mark.parametrize("block", nightly(BLOCKS, gate=GATE), ids=name)
def test_python_block_runs(block: str, tmp_path: Path) -> None:
    run = fresh_processes.run(block, cwd=tmp_path)
    assert run.returncode == 0, run.output
    for line in PRINTED.get(block, "").splitlines():
        assert line in run.output, run.output


def test_the_first_chapters_of_the_guide_run(tmp_path: Path) -> None:
    code = {cell.id: cell.source for cell in render.read().cells}
    program = "\n".join(code[cell] for cell in CELLS)
    run = fresh_processes.run(re.sub("^%", "# %", program, flags=re.M), cwd=tmp_path)
    assert run.returncode == 0, run.output
    assert "3 examples in 8 microbatches: equal to the plain model" in run.output
