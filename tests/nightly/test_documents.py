"""The longer blocks of code in documents run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_documents import assert_block_runs, is_slow, name
from tests.docs.test_links import DOCUMENTS, blocks


@pytest.mark.parametrize(
    "block", [b for d in DOCUMENTS if is_slow(d) for b in blocks(d, "python")], ids=name
)
def test_python_block_runs(block: str, tmp_path: Path) -> None:
    assert_block_runs(block, tmp_path)
