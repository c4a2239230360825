"""What is said of an error that nobody expected."""

from __future__ import annotations

import pytest

from tfgpipe._util import crash_report

pytestmark = pytest.mark.pure

GRAPH = """Graph execution error:

Detected at node while/dense/MatMul defined at (most recent call last):
<stack traces unavailable>
OOM when allocating tensor with shape[9,9]
\t [[{{node MatMul}}]] [Op:__inference_one_step_1]"""

SEVERAL = """Graph execution error:

2 root error(s) found.
  (0) RESOURCE_EXHAUSTED:  OOM when allocating tensor with shape[9,9]
\t [[{{node MatMul}}]]
  (1) RESOURCE_EXHAUSTED:  OOM when allocating tensor with shape[8,8]
0 successful operations.
0 derived errors ignored. [Op:__inference_one_step_1]"""


class BrokenError(Exception):
    def __str__(self) -> str:
        raise AttributeError("no such attribute")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BrokenError(), "BrokenError: <exception str() failed>"),
        (ValueError("A number.\nAnd more."), "ValueError: A number."),
        (ValueError(), "ValueError"),
        (RuntimeError("{{function_node f}} OOM of it"), "RuntimeError: OOM of it"),
        (RuntimeError(GRAPH), "RuntimeError: OOM when allocating tensor with"),
        (RuntimeError(SEVERAL), "RuntimeError: OOM when allocating tensor with"),
        (ValueError("\ud800"), "ValueError: \ud800"),
    ],
)
def test_the_sentence_says_what_was_wrong(error, words, tmp_path):
    said = crash_report.report_crash(error, argv=["trainer", "--flag"], folder=tmp_path)
    assert said.startswith(f"Crashed: {words}")
    (log,) = tmp_path.glob("crash-*.log")
    assert said.endswith(f"\nThe traceback is in {log}.")
    assert "trainer --flag" in log.read_text(encoding="utf-8")


def test_where_nothing_can_be_written_the_traceback_is_printed(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    said = crash_report.report_crash(
        ValueError("A number."), argv=[], folder=tmp_path / "none"
    )
    assert said == "Crashed: ValueError: A number."
    assert capsys.readouterr().err == "ValueError: A number.\n"
