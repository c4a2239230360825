"""The one benchmark: which result is shown, and what is written of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as program

pytestmark = pytest.mark.pure


def result(date: str, *, others: float = 0.02, **changed):
    """Returns a result in which each side of a workload takes some milliseconds."""
    ms = {
        "tfgpipe plain": 100.0,
        "tfgpipe plain XLA": 90.0,
        "tfgpipe gpipe": 70.0,
        "tfgpipe 1f1b": 60.0,
        "torch plain": 120.0,
        "torch gpipe": 80.0,
        "torch 1f1b": 75.0,
        "torch 1f1b compiled": 50.0,
    }
    rows = [
        {"workload": workload, "side": side, "ms": value}
        for workload in program.WORKLOADS
        for side, value in (ms | changed).items()
    ]
    return {
        "date": date,
        "commit": "abc",
        "machine": "some, 2 cores",
        "flags": ["avx2"],
        "versions": {"torch": "2"},
        "steps": 7,
        "others": dict.fromkeys(program.WORKLOADS, others),
        "rows": rows,
    }


def write(folder: Path, *results) -> None:
    for number, each in enumerate(results):
        (folder / f"{number}.json").write_text(json.dumps(each), "utf-8")


def test_the_newest_result_of_a_quiet_machine_and_all_workloads_is_shown(tmp_path):
    partly = result("2026-03-04 10:00")
    del partly["others"]["mlp"]
    busy = result("2026-03-03 10:00", others=0.4)
    write(
        tmp_path, result("2026-03-01 10:00"), result("2026-03-02 10:00"), busy, partly
    )
    assert program.newest(tmp_path)["date"] == "2026-03-02 10:00"


def test_without_a_quiet_result_it_is_said_how_to_make_one(tmp_path):
    write(tmp_path, result("2026-03-01 10:00", others=0.4))
    with pytest.raises(FileNotFoundError, match="`python -m benchmarks` makes one"):
        program.newest(tmp_path)


def test_each_library_is_shown_with_its_best_schedule():
    found = program.best(result("now")["rows"], "mlp")
    assert found == {
        "plain Keras": 100.0,
        "plain Keras, XLA": 90.0,
        "tfgpipe": 60.0,
        "plain torch": 120.0,
        "torch": 75.0,
        "torch, compiled": 50.0,
    }


def test_a_side_with_other_losses_has_no_time():
    rows = result("now", **{"torch 1f1b compiled": "losses differ"})["rows"]
    assert "torch, compiled" not in program.best(rows, "mlp")


def test_a_ratio_is_to_the_best_of_the_others_and_text_around_stays(
    tmp_path, monkeypatch
):
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n\n{program.BEGIN}old\n{program.END}\nAfter.\n")
    monkeypatch.setattr(program, "PAGES", (page,))
    program.write_pages(result("now"))
    text = page.read_text("utf-8")
    assert text.startswith("Before.\n")
    assert text.endswith("\nAfter.\n")
    assert "old" not in text
    # 60 of compiled torch's 50.
    assert text.count("| 1.20 |") == len(program.WORKLOADS)
    program.write_pages(result("now"))
    assert page.read_text("utf-8") == text


def test_a_page_without_marks_is_refused(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("Text.\n")
    monkeypatch.setattr(program, "PAGES", (page,))
    with pytest.raises(ValueError, match=r"Expected .*--pages --> and .* in .*page.md"):
        program.write_pages(result("now"))
    assert page.read_text("utf-8") == "Text.\n"
