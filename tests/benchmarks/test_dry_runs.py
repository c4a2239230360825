"""Which dry runs are made, and how their table is drawn."""

from __future__ import annotations

import pytest

from benchmarks.studies import dry_runs

pytestmark = pytest.mark.pure


def test_each_value_of_each_list_is_a_run() -> None:
    found = dry_runs._settings(["a=1"], ["b.c=2,3", "d=x,y"])
    assert found == [
        ["a=1", f"b.c={c}", f"d={d}"] for c in ("2", "3") for d in ("x", "y")
    ]
    assert dry_runs._settings([], []) == [[]]


def test_an_experiment_is_a_row_and_a_platform_a_column() -> None:
    def row(name: str, platform: str, compiled: str) -> dict[str, str]:
        names = {"experiment": name, "settings": "", "platform": platform}
        return {**names, "compiled": compiled}

    rows = [row("A", "h100-80g", "6 of 6"), row("A", "tpu-v4", "5 of 6")]
    assert dry_runs.summary([*rows, row("B", "tpu-v4", "2 of 2")]) == [
        {"experiment": "A", "settings": "", "tpu-v4": "5 of 6", "h100-80g": "6 of 6"},
        {"experiment": "B", "settings": "", "tpu-v4": "2 of 2", "h100-80g": "-"},
    ]
