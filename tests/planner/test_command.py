"""The command line."""

from __future__ import annotations

import pytest

from tests.helpers.subprocesses import interpret
from tests.planner.small_models import ASKED
from tfgpipe.planner import __main__, command
from tfgpipe.planner import __main__ as program

pytestmark = pytest.mark.pure


def test_help_is_one_screen_and_loads_no_tensorflow():
    result = interpret(
        "import sys; from tfgpipe.planner.__main__ import main\n"
        "try: main(['planner', '--help'])\n"
        "except SystemExit as end: status = end.code\n"
        "sys.stderr.write('tensorflow' * ('tensorflow' in sys.modules))\n"
        "sys.exit(status)",
        COLUMNS="80",
    )
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["planner"], "are required: --model, --batch_size, --device, --devices"),
        ([*ASKED, "extra"], "unrecognized arguments: extra"),
        ([*ASKED, "--devices=0"], "--devices: expected 1 or more; received '0'"),
        ([*ASKED, "--device=abacus"], "`device` is one of"),
        ([*ASKED, "--device_file=none.toml"], "none.toml"),
        ([*ASKED, "--remats=some"], "--remats: expected some of stage, layer,"),
        ([*ASKED, "--schedules=fifo"], "expected some of gpipe, 1f1b,"),
        ([*ASKED, "--microbatches=a"], "--microbatches: expected 1 or more"),
        ([*ASKED, "--model=nowhere"], "received 'nowhere'"),
        ([*ASKED, "--model=tests.nothing"], "has no attribute 'nothing'"),
        ([*ASKED, "--model=math.pi"], "received 'math.pi': it is a float."),
        ([*ASKED, "--unknown"], "unrecognized arguments: --unknown"),
        # Before the search, which is long.
        ([*ASKED, "--picture=none/a.png"], "Expected --picture=FILE in a folder that"),
        ([*ASKED, "--picture=a.abc"], "Expected --picture=FILE that ends in one of"),
    ],
)
def test_what_is_wrong_is_said_with_status_1(arguments, words, capsys):
    with pytest.raises(SystemExit) as raised:
        program.main(arguments)
    assert raised.value.code == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.endswith("Try `python -m tfgpipe.planner --help`.\n")


def test_what_nobody_expected_is_a_sentence_and_a_file(capsys, monkeypatch, tmp_path):
    def fail(*arguments):
        raise RuntimeError("A surprise.")

    monkeypatch.setattr(command, "_search", fail)
    monkeypatch.setattr(__main__, "_imported", lambda name: fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert program.main(ASKED) == 1
    (log,) = tmp_path.glob("crash-*.log")
    assert capsys.readouterr().err == (
        f"Crashed: RuntimeError: A surprise.\nThe traceback is in {log}.\n"
    )
    assert "in fail" in log.read_text()
