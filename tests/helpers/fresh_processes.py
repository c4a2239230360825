"""Programs that each need a TensorFlow of their own, which is imported once.

    server ──fork──▶ python -m trainer ...       asked for by `start`, which gives a
           ──fork──▶ python -m tests.x ...       `Program`, as `subprocess.Popen` does
           ──fork──▶ python -c "import ..."      asked for by `run`

The server has TensorFlow imported, and not started, so that each program makes logical
devices of its own. Modules run at the same time, may be sent signals, and come to the
end of Python as `python -m` does. There is one server for all tests of a process.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.helpers.subprocesses import ROOT, command, fork


def start(module: str, *arguments: str, log: Path, **variables: str) -> Program:
    """Runs a module in a process of its own.

    Args:
        module: Its name.
        arguments: Its command line.
        log: What it prints goes to the end of this file.
        variables: Of its environment.
    """
    asked = {"module": module, "arguments": arguments, "log": str(log)}
    return Program(_server().ask(do="start", **asked, variables=variables))


@dataclasses.dataclass(frozen=True)
class Run:
    """A program that has ended.

    Attributes:
        returncode: Its exit status, or minus the number of the signal that ended it.
        output: What it printed, errors included.
    """

    returncode: int
    output: str


def run(program: str, *, cwd: Path) -> Run:
    """Runs the text of a program in a folder, as `python -c` does."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "printed"
        asked = {"program": program, "cwd": str(cwd), "log": str(log)}
        with Program(_server().ask(do="run", **asked)) as started:
            status = started.wait(600)
        return Run(status, log.read_text(errors="replace"))


class Program:
    """A process that `start` has made.

    Attributes:
        pid: Its number.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *raised: object) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait(60)
        with contextlib.suppress(ProcessLookupError):  # What it has started.
            os.killpg(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """Returns its exit status, or None while it runs.

        That of one which a signal has ended is minus the signal's number.
        """
        if self._status is None:
            self._status = _server().ask(do="poll", pid=self.pid)
        return self._status

    def wait(self, seconds: float) -> int:
        """Returns its exit status, once it has ended."""
        end = time.monotonic() + seconds
        while (status := self.poll()) is None:
            assert time.monotonic() < end, f"It still runs after {seconds:g} s."
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class _Server:
    """The process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            command(__spec__.name),
            cwd=ROOT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, **asked: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@functools.cache
def _server() -> _Server:
    made = _Server()
    atexit.register(made.close)
    return made


def _print_to(log: str) -> None:
    """Makes a session of this process, whose output goes to a file."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    printed = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for source, target in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(source, target)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, buffering=1) for number, mode in enumerate("rww")
    )


def _execute(program: str, cwd: str, log: str) -> int:
    """Runs the text of a program."""
    _print_to(log)
    os.chdir(cwd)
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    return 0


def _become(module: str, arguments: list[str], log: str, variables: Any) -> None:
    """Runs a module, up to the end of Python."""
    _print_to(log)
    os.environ.update(variables)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _serve() -> None:
    import keras  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import tensorflow as tf  # noqa: F401

    import tfgpipe_trainer.commands.runs  # noqa: F401

    running = set()
    while line := sys.stdin.readline():
        asked = json.loads(line)
        what = asked.pop("do")
        answer = None
        if what == "start":
            answer = os.fork()
            if not answer:
                _become(**asked)
                return
            running.add(answer)
        elif what == "run":
            answer = fork(functools.partial(_execute, **asked))
            running.add(answer)
        else:
            pid, status = os.waitpid(asked["pid"], os.WNOHANG)
            if pid:
                answer = os.waitstatus_to_exitcode(status)
                running.discard(pid)
        print(json.dumps(answer), flush=True)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
