"""The command line."""

from __future__ import annotations

import pytest

from tests.helpers.forks import interpret
from tfgpipe.planner import __main__, flags
from tfgpipe.planner import __main__ as program

ASKED = ["planner", "--params=lm.Tiny", "--device=h100-80g", "--devices=4"]


def run(*arguments):
    code = (
        "import sys; from tfgpipe.planner.__main__ import main\n"
        f"status = main(['planner', *{arguments!r}])\n"
        "sys.stderr.write('tensorflow' * ('tensorflow' in sys.modules))\n"
        "sys.exit(status)"
    )
    return interpret(code)


def test_help_is_one_screen_and_loads_no_tensorflow():
    result = run("--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == flags.HELP
    lines = flags.HELP.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_help_names_every_flag():
    defined = set(flags.define()) - {"h"}
    assert {name for name in defined if f"--{name}" not in flags.HELP} == set()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["planner"], "Expected --params=..., such as --params=lm.OneBillion."),
        ([*ASKED, "extra"], "Expected flags only; received 'extra'."),
        ([*ASKED, "--devices=0"], "Expected --devices of 1 or more; received 0."),
        ([*ASKED, "--device=abacus"], "`device` is one of"),
        ([*ASKED, "--device_file=none.toml"], "none.toml"),
        ([*ASKED, "--remats=some"], "Expected --remats of none, stage, layer;"),
        ([*ASKED, "--schedules=fifo"], "Expected --schedules of gpipe, 1f1b,"),
        ([*ASKED, "--microbatches=a"], "Expected --microbatches of 1 or more"),
        ([*ASKED, "--params=lm.Nothing"], "received 'lm.Nothing'"),
        ([*ASKED, "--set=model.widht=3"], "Did you mean model.width?"),
        ([*ASKED, "--unknown"], "unknown"),
        # Before the search, which is long.
        ([*ASKED, "--picture=none/a.png"], "Expected --picture=FILE in a folder that"),
        ([*ASKED, "--picture=a.abc"], "Expected --picture=FILE that ends in one of"),
    ],
)
def test_what_is_wrong_is_said(arguments, words, capsys):
    assert program.main(arguments) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.endswith("Try `python -m tfgpipe.planner --help`.\n")


def test_what_nobody_expected_is_a_sentence_and_a_file(capsys, monkeypatch, tmp_path):
    def fail(*arguments):
        raise RuntimeError("A surprise.")

    monkeypatch.setattr(__main__, "_search", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert program.main(ASKED) == 1
    (log,) = tmp_path.glob("crash-*.log")
    assert capsys.readouterr().err == (
        f"Crashed: RuntimeError: A surprise.\nThe traceback is in {log}.\n"
    )
    assert "in fail" in log.read_text()
