"""The table of the last runs in `benchmarks/RESULTS.md`."""

from __future__ import annotations

import pytest

from benchmarks import targets

pytestmark = pytest.mark.pure


def test_the_table_is_of_the_last_two_runs():
    text = targets.RESULTS.read_text("utf-8")
    inside = text.partition(targets.BEGIN)[2].partition(targets.END)[0]
    assert inside == f"\n{targets.section()}\n"


def test_bounds_are_from_above_or_below():
    name = "mlp, K=2, M=4: speed-up, of its bound"
    assert [targets.verdict(name, x) for x in (0.84, 0.85)] == ["short", "pass"]
    name = "microseconds an action"
    assert [targets.verdict(name, x) for x in (300, 301)] == ["pass", "short"]
    assert targets.verdict("two at once", 2.0) == ""


def test_figures_are_shown_beside_those_before():
    drawn = targets.draw({"microseconds an action": "40.81"}, {})
    assert drawn.splitlines()[2] == (
        "| microseconds an action | 40.8 | at most 300 | pass |  |"
    )
