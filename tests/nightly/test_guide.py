"""The guide runs from its first cell to its last."""

from __future__ import annotations

from docs import render


def test_the_guide_runs_in_a_new_kernel(tmp_path, monkeypatch):
    """Every assertion in it holds; what it takes is not asserted."""
    monkeypatch.setenv("PYTHONPATH", str(render.FOLDER.parents[1]))
    render.execute(render.read(), folder=tmp_path)
