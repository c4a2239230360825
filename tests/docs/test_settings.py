"""The numbers in `docs/how-to/settings.md` are those that simulation gives."""

from __future__ import annotations

import re

import pytest

from tests.helpers.subprocesses import ROOT

pytestmark = pytest.mark.pure

DOCUMENT = ROOT / "docs/how-to/settings.md"


def test_simulated_rows_are_those_in_the_tables(capsys):
    text = DOCUMENT.read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(block, DOCUMENT.name, "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    rows = [line for line in printed if line.startswith("|")]
    assert len(rows) == 18
    assert not [row for row in rows if row not in text]
    in_flight = re.findall(r"^\| `\"\w+\"` \| [\d.]+% \| (\d+)", text, re.MULTILINE)
    assert f"in flight [{', '.join(in_flight)}]" in printed
    assert "recomputing 76.0" in printed
