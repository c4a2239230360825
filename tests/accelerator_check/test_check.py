"""The check of accelerators: its report, and parts that fail, crash or hang."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.accelerator_check import __main__ as program
from tests.accelerator_check.difference import difference
from tests.accelerator_check.intervals import overlap
from tests.accelerator_check.report import (
    PARTS,
    NotRunError,
    Outcome,
    Part,
    Recorder,
    report,
)
from tests.helpers.subprocesses import python

pytestmark = pytest.mark.pure

PART = Part(name="some", title="Some part", minutes=1)


def recorded(body):
    """Returns the outcome that a process which runs `body` leaves."""
    stream = io.StringIO()
    recorder = Recorder(stream, seconds=10)
    with contextlib.suppress(ZeroDivisionError):
        recorder.run(body)
    outcome = Outcome(PART)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines[-1]["kind"] == "end"
    for entry in lines[:-1]:
        outcome.add(entry)
    return outcome


def test_the_report_has_each_parts_result_reasons_and_tables():
    def body(recorder):
        recorder.row("Copies", ends="0 to 1", predicted=8, ran=7)
        recorder.row("Copies", ends="1 to 0", predicted=8, ran=8)
        recorder.left_out("the host: it is the device")
        recorder.failed("7 is not 8\nbut less | or so")

    none = Outcome(PARTS[0], "not run", ["time: 20 minutes were over"])
    text = report([recorded(body), none, Outcome(PARTS[1])], about="A day.")
    assert "1 passed, 1 failed, 1 not run. A day." in text
    assert "| Some part | failed | 0 | 7 is not 8 |" in text
    assert f"| {PARTS[0].title} | not run | 0 | time: 20 minutes were over |" in text
    assert "## Some part: failed\n\n- 7 is not 8" in text
    table = "| ends | predicted | ran |\n|---|---|---|\n| 0 to 1 | 8 | 7 |\n| 1 to 0 |"
    assert f"**Copies**\n\n{table}" in text
    assert "Not run: the host: it is the device" in text


def test_errors_are_recorded_with_what_was_found_before():
    def body(recorder):
        recorder.text("found")
        recorder.row("Numbers", x=1 / 0)

    outcome = recorded(body)
    assert outcome.status == "failed"
    assert outcome.reasons == ["ZeroDivisionError: division by zero"]
    assert outcome.findings == [("", "found")]


def test_what_cannot_run_is_no_failure():
    def body(recorder):
        raise NotRunError("no GPU")

    outcome = recorded(body)
    assert (outcome.status, outcome.reasons) == ("not run", ["no GPU"])


def test_a_part_that_fails_and_then_cannot_run_has_failed():
    def body(recorder):
        recorder.failed("wrong")
        raise NotRunError("no GPU")

    assert recorded(body).status == "failed"


WRITES = """
import sys, time
with open(sys.argv[1], "a") as stream:
    print('{"kind": "text", "value": "found"}', file=stream, flush=True)
"""


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("import os; os.abort()", "ended with -6"),
        ("sys.exit(3)", "ended with 3"),
        ("time.sleep(60)", "no end within 1 s"),
    ],
)
def test_a_part_that_crashes_or_hangs_leaves_what_it_found(tmp_path, more, why):
    path = tmp_path / f"{PART.name}.jsonl"
    command = [sys.executable, "-I", "-c", WRITES + more, str(path)]
    outcome = program.run_part(PART, seconds=1, folder=tmp_path, command=command)
    assert outcome.status == "failed"
    assert why in outcome.reasons[0]
    assert outcome.findings == [("", "found")]


def test_parts_that_are_not_reached_in_time_are_named(tmp_path):
    def run(part, *, seconds, folder, options):
        assert seconds <= 60 * part.minutes
        return Outcome(part)

    arguments = {"folder": tmp_path, "run": run}
    done = program.check(PARTS, minutes=1, **arguments)
    assert {x.status for x in done} == {"passed"}
    late = program.check(PARTS, minutes=0, **arguments)
    assert {(x.status, *x.reasons) for x in late} == {
        ("not run", "time: 0 minutes were over")
    }
    text = (tmp_path / "report.md").read_text("utf-8")
    assert all(part.title in text for part in PARTS)


@pytest.mark.parametrize(
    ("statuses", "code"),
    [(["passed", "not run"], 0), (["failed", "passed"], 1)],
)
def test_the_exit_status_says_whether_a_part_failed(monkeypatch, statuses, code):
    outcomes = [Outcome(PART, status) for status in statuses]
    monkeypatch.setattr(program, "check", lambda *_, **__: outcomes)
    monkeypatch.setattr(sys, "argv", ["check", "--parts=identity"])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert int(end.value.code) == code


# -- what is compared -----------------------------------------------------------------

ONES = np.ones(3, "float32")


def test_differences_are_relative_to_the_largest_of_all():
    large, small = np.array([100.0]), np.array([1e-3])
    found = difference([large, small], [large, small + 1e-2], 1e-4)
    assert found == pytest.approx(1e-2 / (1e-4 * (100 + 1e-3)))


@pytest.mark.parametrize(
    "received",
    [
        [None],
        [np.array([1, np.nan, 1], "float32")],
        [np.array([1, np.inf, 1], "float32")],
        [np.ones(4, "float32")],
    ],
)
def test_what_is_missing_or_no_number_is_infinitely_different(received):
    assert difference([ONES], received, 1e-3) == np.inf


def test_integers_are_equal_or_not():
    seeds = np.array([1, 2], "uint32")
    assert difference([seeds], [seeds], 1e-3) == 0
    assert difference([seeds], [seeds + 1], 1e-3) == np.inf


def test_overlap_counts_what_is_in_both_once():
    copies, kernels = [(0.0, 2.0), (1.0, 3.0), (8.0, 9.0)], [(2.5, 8.5), (2.0, 4.0)]
    assert overlap(copies, kernels) == pytest.approx(1.5)


# -- on logical CPUs ------------------------------------------------------------------

NOT_RUN = (
    "NCCL: it sums over GPUs",
    "lm.Small: it needs accelerators",
    "memory: TensorFlow counts that of GPUs alone",
    "operations on the host: the devices are the host's",
    "overlap of copies and computation: no GPU",
)


def checked(*flags):
    """Runs the check in a process of its own."""
    return python("-m", "tests.accelerator_check", *flags)


@pytest.mark.nightly
def test_all_that_cpus_can_show_passes_and_the_rest_is_named(tmp_path):
    run = checked("--quick", f"--folder={tmp_path}")
    text = (tmp_path / "report.md").read_text("utf-8")
    assert run.returncode == 0, text
    assert f"{len(PARTS)} passed, 0 failed, 0 not run" in text
    for what in NOT_RUN:
        assert f"Not run: {what}" in text
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    # Every value of each factor, with the differences of the case.
    for value in ("gpipe", "1f1b", "interleaved", "zero_bubble", "mixed_bfloat16"):
        assert re.search(rf"\| {value} \|.*\| 0\.\d+ \|", text), value


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check") / "exported"
    run = checked("--quick", f"--export={folder}")
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.nightly
def test_functions_are_exported(exported):
    number = len(list(exported.glob("*.mlir.gz")))
    assert number == len(list(exported.glob("*.npz"))) > 60
    assert sum(path.stat().st_size for path in exported.iterdir()) < 40 * 2**20


@pytest.mark.nightly
@pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX is not installed."
)
def test_jax_gives_the_same_for_exported_functions(exported):
    run = subprocess.run(
        [sys.executable, exported / "run_exported.py", exported, "--repeats=1"],
        cwd=exported,  # It needs nothing of the checkout.
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert " functions, 0 failed." in (exported / "report-cpu.md").read_text("utf-8")


@pytest.mark.nightly
def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "kept").write_text("text")
    run = checked(f"--export={tmp_path}")
    assert run.returncode == 1
    assert "Expected a new folder, or one of an export" in run.stderr
    assert (tmp_path / "kept").read_text() == "text"
