"""The command lines of workers and of the supervisor."""

from __future__ import annotations

import pytest

from tfgpipe.cluster import __main__ as program
from tfgpipe.cluster import server, supervisor, worker

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--help", "{worker,launch}"),
        ("worker --help", "only inside a private network, with TFGPIPE_TOKEN=SECRET"),
        ("launch --help", "--max_restarts N restarts (10)"),
    ],
)
def test_help_is_one_screen_without_what_is_internal(
    arguments: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as raised:
        program.main(["cluster", *arguments.split()])
    assert raised.value.code == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= 24
    assert words in " ".join(printed.split())
    assert "server" not in printed.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: {worker,launch}"),
        ("start", "invalid choice: 'start'"),
        ("worker", "the following arguments are required: --port"),
        ("worker --port=80", "of a port from 1024 to 65534; received '127.0.0.1:80'"),
        ("worker --port=4000 --devices=0", "expected at least 1; received 0"),
        (
            "worker --port=4000 --host=10.0.0.5",
            "Expected --host=127.0.0.1, which takes this machine's calls alone, or",
        ),
        ("launch --workers=2", "the following arguments are required: command"),
        ("launch -- true", "one of --workers and --replicas is required"),
        ("launch --cluster=a:4000 -- true", "unrecognized arguments: --cluster"),
        ("worker --port=1 --cluster=a", "Expected a worker's address such as"),
        ("launch --worker=2 -- true", "unrecognized arguments: --worker=2"),
        (
            "launch --workers=3 --replicas=2 -- true",
            "Received 3 workers for 2 replicas. List a multiple of the replicas.",
        ),
        (
            "launch --workers=1 --replicas=2 -- true",
            "Received 1 workers for 2 replicas.",
        ),
        (
            "worker --port=4000 --cluster=a:4000,b:4000",
            "Received --cluster=a:4000,b:4000, --index=None, --port=4000.",
        ),
        ("worker --port=4000 --index=0", "Received --cluster=None, --index=0"),
        (
            "worker --port=4000 --cluster=a:4000,b:4000 --index=2",
            "and --index the position of this one in it, from 0, with the port of",
        ),
        ("worker --port=4000 --cluster=a:5000 --index=0", "with the port of --port."),
        ("launch --workers=2 --port=1 -- true", "unrecognized arguments: --port=1"),
    ],
)
def test_a_wrong_command_line_is_refused_with_status_1(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        program.main(["cluster", *arguments.split()])
    assert raised.value.code == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Try `python -m tfgpipe.cluster" in printed.err


def test_command_lines_say_what_to_do() -> None:
    given = ["worker", "--port=4000", "--devices=2"]
    options = worker.WorkerOptions(port=4000, devices=2)
    assert program.parse(given) == (worker.run, options)
    given += ["--cluster=a:4000, b:4000", "--index=1"]
    options = worker.WorkerOptions(
        port=4000, devices=2, cluster="a:4000, b:4000", index=1
    )
    assert program.parse(given) == (worker.run, options)
    assert options.workers == "a:4000,b:4000"
    command = ["a", "--b", "--", "c", "--workers=3"]
    plan = supervisor.LaunchOptions(command=command, workers=2)
    found = program.parse(["launch", "--workers=2", "--", *command])
    assert found == (supervisor.run, plan)
    given = ["server", "--port=4000", "--devices=2", "--loopback"]
    options = server.ServerOptions(port=4000, devices=2, loopback=True)
    assert program.parse(given) == (server.run, options)


def test_delays_grow_to_half_a_minute() -> None:
    delays = [supervisor.delay_of_restart(number) for number in range(1, 9)]
    assert delays == [0, 1, 2, 4, 8, 16, 30, 30]
