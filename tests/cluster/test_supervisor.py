"""The supervisor: what it starts, what it starts again, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import (
    CLUSTER,
    arguments,
    descendants,
    environment,
    none_of,
    running,
    wait_for,
)
from tfgpipe.cluster import supervisor as supervisor_lib
from tfgpipe.cluster.__main__ import main
from tfgpipe.cluster.addresses import (
    REPLICA_VARIABLE,
    WORKERS_VARIABLE,
    parse_addresses,
)


def launch(code: str, *flags: str) -> int:
    """Runs a Python program under the supervisor."""
    command = [sys.executable, "-c", code]
    flags = flags or ("--replicas=1",)
    return main(["cluster", "launch", *flags, "--", *command])


def counting(path: Path, code: str) -> str:
    """Returns a program that counts its starts in a file, as `n`."""
    return (
        "import os, pathlib, signal, sys, time\n"
        f"path = pathlib.Path({str(path)!r})\n"
        "n = len(path.read_text()) + 1 if path.exists() else 1\n"
        "path.write_text('x' * n)\n"
        f"{code}\n"
    )


def test_the_command_finds_the_workers_and_its_status_is_passed_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = counting(
        tmp_path / "n", f"print(os.environ[{WORKERS_VARIABLE!r}]); sys.exit(7)"
    )
    assert launch(code, "--workers=2", f"--log_dir={tmp_path}") == 7
    printed = capfd.readouterr()
    assert len(parse_addresses(printed.out.strip())) == 2
    assert f"Starting 2 workers; their logs are in {tmp_path}." in printed.err
    assert (tmp_path / "n").read_text() == "x"


@pytest.mark.parametrize(
    ("end", "how", "times"),
    [
        ("sys.exit(75)", "ended with status 75", 2),
        ("sys.exit(42)", "ended with status 42", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL", 1),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV", 1),
    ],
)
def test_a_command_that_asks_for_it_or_is_killed_is_started_again(
    end: str,
    how: str,
    times: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = counting(tmp_path / "n", f"{end} if n <= {times} else print('done')")
    assert launch(code) == 0
    printed = capfd.readouterr()
    assert printed.out == "done\n"
    said = ["1 of 10.", "2 of 10, in 1 s."]
    for number, words in enumerate(said):
        line = f"The command {how}: starting it again, {words}\n"
        assert (line in printed.err) == (number < times)


def test_restarts_are_limited(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = counting(tmp_path / "n", "sys.exit(75)")
    assert launch(code, "--replicas=1", "--max_restarts=1") == 75
    assert (tmp_path / "n").read_text() == "xx"
    code = counting(tmp_path / "n", "os.kill(os.getpid(), signal.SIGKILL)")
    killed = 128 + signal.SIGKILL
    assert launch(code, "--replicas=1", "--max_restarts=0") == killed
    said = capfd.readouterr().err
    assert "ended with status 75, and --max_restarts=1 are used up." in said


def test_waits_begin_anew_after_a_good_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor_lib, "_GOOD_SECONDS", 3)
    code = counting(tmp_path / "n", "time.sleep(4 if n == 3 else 0); sys.exit(75)")
    assert launch(code, "--replicas=1", "--max_restarts=3") == 75
    said = capfd.readouterr().err
    assert "1 of 3." in said
    assert "2 of 3, in 1 s." in said
    assert "3 of 3." in said


def test_a_worker_that_cannot_start_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "sitecustomize.py"
    broken.write_text("raise SystemExit('no such library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ["--workers=2", f"--log_dir={tmp_path / 'logs'}"]
    assert main(["cluster", "launch", *flags, "--", "sleep", "600"]) == 2
    said = capfd.readouterr().err
    assert "ended with status " in said
    assert "It said: " in said
    assert f"SystemExit: no such library (in {tmp_path / 'logs'}" in said


def test_a_command_that_does_not_exist_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    flags = ["--replicas=1", "--", "no-such-program"]
    assert main(["cluster", "launch", *flags]) == 2
    said = capfd.readouterr().err
    assert "No such file or directory: 'no-such-program'" in said


@pytest.mark.parametrize(("number", "expected"), [("SIGTERM", 9), ("SIGINT", 130)])
def test_signals_reach_the_command_and_nothing_is_left(
    number: str, expected: int, tmp_path: Path
) -> None:
    # Ends in its own way at SIGTERM; has started a child that would not.
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=False)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    flags = ["launch", "--replicas=1", "--", sys.executable, "-c", code]
    log = tmp_path / "log"
    with running([*CLUSTER, *flags], log=log, env=environment()) as supervisor:
        wait_for("up", log)
        pids = descendants(supervisor.pid)
        assert len(pids) == 3  # With the guard.
        os.kill(supervisor.pid, getattr(signal, number))
        assert supervisor.wait(20) == expected
        assert none_of(pids)
    assert f"{number}: ending everything." in log.read_text()


def test_replicas_end_and_start_again_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The second is killed once; the first would sleep on.
    code = (
        "import json, os, pathlib, signal, time\n"
        "config = json.loads(os.environ['TF_CONFIG'])\n"
        "index = config['task']['index']\n"
        "assert len(config['cluster']['worker']) == 2\n"
        f"marks = pathlib.Path({str(tmp_path)!r})\n"
        "again = len(list(marks.iterdir())) >= 2\n"
        "(marks / f'{index}-{os.getpid()}').touch()\n"
        "while len(list(marks.iterdir())) < 2: time.sleep(0.05)\n"
        "if not again and index == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if not again: time.sleep(600)\n"
        "os.write(1, b'done %d\\n' % index)  # At once, also unbuffered.\n"
    )
    assert launch(code, "--replicas=2") == 0
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == ["done 0", "done 1"]
    assert "Replica 1 was ended by SIGKILL: ending the others." in printed.err
    assert "was ended by SIGKILL: starting it again, 1 of 10." in printed.err


def test_replicas_find_the_workers_and_which_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import os\n"
        f"names = {WORKERS_VARIABLE!r}, {REPLICA_VARIABLE!r}\n"
        "values = ' '.join(os.environ[name] for name in names)\n"
        "os.write(1, values.encode() + b'\\n')  # At once, also unbuffered.\n"
    )
    flags = ["--workers=2", "--replicas=2", f"--log_dir={tmp_path}"]
    assert launch(code, *flags) == 0
    lines = [line.split() for line in sorted(capfd.readouterr().out.splitlines())]
    (first, _), (second, _) = lines
    assert [replica for _, replica in lines] == ["0", "1"]
    assert first == second
    assert len(parse_addresses(first)) == 2


def test_a_replica_that_hangs_is_started_again_with_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import json, os, pathlib, signal, time\n"
        "from tfgpipe.cluster import health, processes\n"
        "health.SILENCE_SECONDS = 3.0\n"
        "config = json.loads(os.environ['TF_CONFIG'])\n"
        "index = config['task']['index']\n"
        f"mark = pathlib.Path({str(tmp_path)!r}) / str(index)\n"
        "again = mark.exists()\n"
        "mark.touch()\n"
        "processes.rendezvous(config['cluster']['worker'], index)\n"
        "if not again and index == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "if not again: time.sleep(600)\n"
        "os.write(1, b'done %d\\n' % index)  # At once, also unbuffered.\n"
    )
    assert launch(code, "--replicas=2") == 0
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == ["done 0", "done 1"]
    assert "is gone: it has been silent for 3 s." in printed.err
    assert "Replica 0 ended with status 75: ending the others." in printed.err
    assert "ended with status 75: starting it again, 1 of 10." in printed.err


def test_a_replica_that_fails_for_good_ends_the_run_with_its_status(
    capfd: pytest.CaptureFixture[str],
) -> None:
    # The others learn of it before its process is gone, and end with 75 at once.
    code = (
        "import json, os, sys, time\n"
        "index = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "if index == 1: time.sleep(2)\n"
        "sys.exit(2 if index == 1 else 75)\n"
    )
    assert launch(code, "--replicas=2") == 2
    assert "starting it again" not in capfd.readouterr().err


def test_a_worker_that_is_killed_or_asked_to_end_is_started_again_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor_lib, "_LOSS_SECONDS", 5)
    program = (
        "import tensorflow as tf\n"
        "from tests.helpers import processes\n"
        "from tfgpipe import cluster\n"
        "def end(number):\n"
        "    [pid] = [pid for pid in processes.descendants(os.getppid())\n"
        "             if '.cluster' + ' worker' in processes.arguments(pid)]\n"
        "    os.kill(pid, number)\n"
        f"cluster.connect(os.environ[{WORKERS_VARIABLE!r}])\n"
        "if n == 1:  # TensorFlow raises something.\n"
        "    end(signal.SIGKILL)\n"
        "    with tf.device('/job:worker/task:0/CPU:0'):\n"
        "        while True: tf.random.normal([3]).numpy()\n"
        "if n == 2:  # It does not notice.\n"
        "    end(signal.SIGTERM)\n"
        "    time.sleep(600)\n"
        "raise ValueError('its own')\n"
    )
    code = counting(tmp_path / "n", program)
    assert launch(code, "--workers=1", f"--log_dir={tmp_path}") == 1
    assert (tmp_path / "n").read_text() == "xxx"
    said = capfd.readouterr().err
    assert said.count("The command ended with status 75: starting it again") == 2
    assert "Worker 0 at 127.0.0.1:" in said
    assert "ValueError: its own" in said
    assert "Worker 0 was ended by SIGKILL. It said: " in said
    assert "Worker 0 ended with status 0. It said: " in said


def test_replicas_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "os.write(1, b'up %d\\n' % child.pid)\n"
        "time.sleep(600)\n"
    )
    command = [*CLUSTER, "launch", "--replicas=2", "--", sys.executable, "-c", code]
    with running(command, log=log) as supervisor:
        wait_for("up", log, count=2)
        pids = descendants(supervisor.pid)
        assert len(pids) == 5
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.wait()
        try:
            assert none_of(pids)
        finally:
            for pid in filter(arguments, pids):
                os.kill(pid, signal.SIGKILL)


def test_workers_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [*CLUSTER, "launch", "--workers=1", f"--log_dir={tmp_path / 'logs'}"]
    code = "import time; time.sleep(600)"
    with running([*command, "--", sys.executable, "-c", code], log=log) as supervisor:
        wait_for("Starting 1 workers", log)
        pids = []
        # The worker, and its server, which runs the supervisor's command until it is
        # replaced by its own.
        while not any("tfgpipe.cluster server" in arguments(pid) for pid in pids):
            time.sleep(0.05)
            pids = descendants(supervisor.pid)
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.wait()
        assert none_of(pids)
