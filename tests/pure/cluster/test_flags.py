"""The command lines of workers and of the supervisor."""

from __future__ import annotations

import pytest

from tfgpipe.cluster import flags
from tfgpipe.cluster.__main__ import main
from tfgpipe.cluster.supervisor import Plan, _Waits
from tfgpipe.cluster.worker import Options


def test_help_fits_a_screen_and_tells_every_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["cluster", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    hidden = {"lifeline"}  # The supervisor's own.
    for name in {*flags.define()} - {*hidden, "h", "help"}:
        assert f"--{name}=" in flags.HELP


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Expected `worker` or `launch`; received neither."),
        ("start", "Expected `worker` or `launch`; received start."),
        ("worker", "Expected --port=N, such as --port=4000."),
        ("worker --port=80", "of a port from 1024 to 65534; received '127.0.0.1:80'"),
        ("worker --port=4000 --devices=0", "is not a positive"),
        (
            "worker --port=4000 --host=10.0.0.5",
            "Expected --host=127.0.0.1, which takes this machine's calls alone, or",
        ),
        ("launch --workers=2", "Expected a command, such as `-- python -m trainer"),
        ("launch -- true", "Expected one of --workers=N, --cluster=LIST and"),
        ("launch --workers=1 --cluster=a:4000 -- x", "Expected one of --workers"),
        ("launch --cluster=a -- true", "Expected a worker's address such as"),
        ("launch --worker=2 -- true", "Unknown command line flag 'worker'"),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", *arguments.split()]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Try `python -m tfgpipe.cluster --help`." in printed.err


def test_command_lines_say_what_to_do() -> None:
    given = ["worker", "--port=4000", "--devices=2"]
    assert flags.parse(["cluster", *given]) == Options(port=4000, devices=2)
    command = ("a", "--b", "--", "c")
    plan = Plan(command=command, workers=2)
    assert flags.parse(["cluster", "launch", "--workers=2", "--", *command]) == plan


def test_waits_grow_and_begin_anew_after_a_good_start() -> None:
    waits = _Waits()
    assert [waits.next(1) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert [waits.next(lived) for lived in (100, 1)] == [0, 1]
