"""The checkpoint that a run goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pure.trainer.test_store import rewrite, write
from trainer.checkpoint import store
from trainer.checkpoint.checkpoints import newest_whole
from trainer.errors import CheckpointError


def test_one_of_another_version_is_refused_and_stays(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    rewrite(tmp_path, 2, lambda body: {**body, "format": 2})
    with pytest.raises(CheckpointError, match=r"of format 1 or before; .* format 2\."):
        newest_whole(tmp_path, set_aside=True)
    assert store.steps(tmp_path) == [1, 2]
