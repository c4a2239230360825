"""Documents of the checkout, and blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.subprocesses import ROOT

DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(
            path
            for top in ("benchmarks", "examples", "tests")
            for path in (ROOT / top).glob("*.md")
        ),
    ]
)


def blocks(document: Path, *languages: str) -> list[str]:
    """Returns the fenced code blocks of a document in any of the languages."""
    fence = rf"^```(?:{'|'.join(languages)})\n(.*?)^```$"
    return re.findall(fence, document.read_text("utf-8"), re.MULTILINE | re.DOTALL)
