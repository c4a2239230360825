"""Supervisor of one machine: workers and a command, restarted together.

TensorFlow's runtime does not go on without a lost process, so an attempt starts all of
them and ends all of them. The command ends with status 75 when it has lost a worker
(`tfgpipe.cluster.connect` sees to that), with 42 when it was asked to stop; either is
followed by another attempt, which goes on from the command's own checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tfgpipe.cluster import addresses
from tfgpipe.cluster.addresses import REPLICA_VARIABLE, WORKERS_VARIABLE
from tfgpipe.cluster.engines.roles import TF_CONFIG, Role
from tfgpipe.cluster.errors import EX_TEMPFAIL, EXIT_PREEMPTED, ClusterError
from tfgpipe.cluster.groups import Groups, ending
from tfgpipe.cluster.health import Deadline
from tfgpipe.cluster.worker import WorkerOptions

_POLL_SECONDS = 0.05
# How long a command may take to end by itself: after a signal, and after a loss.
_GRACE_SECONDS = 30.0
_LOSS_SECONDS = 10.0
# What runs that long has had a good start: delays of restarts begin anew.
_GOOD_SECONDS = 60.0
_RESTARTED = (EX_TEMPFAIL, EXIT_PREEMPTED)

_Process: TypeAlias = "subprocess.Popen[bytes]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The command line of the supervisor.

    Attributes:
        command: The program, and its arguments.
        workers: Number of workers to start, or None.
        replicas: Number of processes of the command, or None for one: clients of the
            workers, or without these processes of `MultiWorkerPipelineStrategy`.
        devices: Into how many devices each worker splits its CPU.
        max_restarts: Most restarts.
        log_dir: The folder of the workers' logs, or None for a new one.

    Raises:
        ValueError: If there is nothing to start, or workers are not for the replicas.
    """

    command: Sequence[str]
    workers: int | None = None
    replicas: int | None = None
    devices: int = 1
    max_restarts: int = 10
    log_dir: str | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.workers is not None:
            addresses.replica_workers(self.workers, 0, self.replicas or 1)
        elif self.replicas is None:
            raise ValueError("one of --workers and --replicas is required")


def run(options: LaunchOptions) -> int:
    """Runs a command with its workers, and returns its exit status."""
    with contextlib.closing(Groups()) as groups:
        try:
            supervisor = _Supervisor(options, groups)
            with supervisor.catching_signals():
                return supervisor.run()
        except (OSError, ClusterError) as error:
            _say(str(error))
            return 2


class _Supervisor:
    """Attempts, until one is the last."""

    def __init__(self, options: LaunchOptions, groups: Groups) -> None:
        self._options = options
        self._groups = groups
        self._signal = 0
        self._good = Deadline(_GOOD_SECONDS)
        self._logs: list[Path] = []
        if options.workers is not None:
            folder = Path(options.log_dir or tempfile.mkdtemp(prefix="tfgpipe-launch-"))
            folder.mkdir(parents=True, exist_ok=True)
            self._logs = [folder / f"worker-{i}.log" for i in range(options.workers)]
            _say(f"Starting {options.workers} workers; their logs are in {folder}.")

    def run(self) -> int:
        """Returns the exit status of the command."""
        most, restarts, in_a_row = self._options.max_restarts, 0, 0
        while not self._signal:
            self._good = Deadline(_GOOD_SECONDS)
            with contextlib.ExitStack() as stack:
                status = self._attempt(stack)
            if self._signal or (status >= 0 and status not in _RESTARTED):
                return status if status >= 0 else 128 + self._signal
            how = f"The command {ending(status)}"
            if restarts == most:
                _say(f"{how}, and --max_restarts={most} are used up.")
                return status if status > 0 else 128 - status
            restarts += 1
            in_a_row = 1 if self._good.is_over else in_a_row + 1
            delay = delay_of_restart(in_a_row)
            wait = f", in {delay:.0f} s" if delay else ""
            _say(f"{how}: starting it again, {restarts} of {most}{wait}.")
            pause = Deadline(delay)
            while not (self._signal or pause.is_over):
                time.sleep(_POLL_SECONDS)
        return 128 + self._signal

    @contextlib.contextmanager
    def catching_signals(self) -> Iterator[None]:
        """Records signals that ask for the end, for `run` to see."""

        def record(signum: int, _: object) -> None:
            self._signal = signum

        taken = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # As under `nohup`.
            taken.remove(signal.SIGHUP)
        before = {number: signal.signal(number, record) for number in taken}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _attempt(self, stack: contextlib.ExitStack) -> int:
        """Runs all once, and returns the command's exit status, negative for a signal.

        Of several processes none goes on without the others, so the first failure ends
        all, and is theirs. The stack ends what is left.
        """
        options = self._options
        ports = addresses.reserve_ports(options.workers or options.replicas or 0, stack)
        listed = [f"127.0.0.1:{port}" for port in ports]
        workers = [self._start_worker(i, listed, stack) for i in range(len(self._logs))]
        commands = [
            self._start(options.command, stack, env={**os.environ, **variables})
            for variables in self._variables(listed)
        ]
        ended = self._wait(commands, workers)
        if self._signal:
            own = [-1 if status is None else status for status in ended]
            return max(own) if min(own) >= 0 else 128 + self._signal
        # A kill goes before what fails because of it.
        status = min(filter(None, ended), default=EX_TEMPFAIL if None in ended else 0)
        if status > 0 and status not in _RESTARTED and self._is_one_lost(workers):
            return EX_TEMPFAIL
        if status in ended and None in ended:
            replica = ended.index(status)
            _say(f"Replica {replica} {ending(status)}: ending the others.")
        return status

    def _wait(
        self, commands: Sequence[_Process], workers: Sequence[_Process]
    ) -> list[int | None]:
        """Returns the status of each process of the command, None for one to be ended.

        What has lost another, or has had a signal, has time to end by itself.
        """
        limit: Deadline | None = None
        signalled = False
        while True:
            ended = [command.poll() for command in commands]
            if None not in ended or (limit is not None and limit.is_over):
                return ended
            if self._signal and not signalled:
                signalled, limit = True, Deadline(_GRACE_SECONDS)
                for command in commands:
                    self._groups.signal(command, self._signal)
                _say(f"{signal.Signals(self._signal).name}: ending everything.")
            elif not (signalled or {*ended} <= {None, 0, EX_TEMPFAIL}):
                return ended
            elif limit is None and (self._is_one_lost(workers) or EX_TEMPFAIL in ended):
                limit = Deadline(_LOSS_SECONDS)
                _say(f"The command has {_LOSS_SECONDS:.0f} s to end.")
            time.sleep(_POLL_SECONDS)

    def _start(
        self, command: Sequence[str], stack: contextlib.ExitStack, **options: Any
    ) -> _Process:
        process = self._groups.start(command, **options)
        stack.callback(self._groups.end, process)
        return process

    def _start_worker(
        self, index: int, listed: Sequence[str], stack: contextlib.ExitStack
    ) -> _Process:
        joined = ",".join(listed) if self._options.replicas is not None else None
        worker = WorkerOptions(
            port=int(listed[index].rpartition(":")[2]),
            devices=self._options.devices,
            cluster=joined,
            index=None if joined is None else index,
        )
        log = stack.enter_context(self._logs[index].open("ab"))
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return self._start(worker.command, stack, **streams)

    def _is_one_lost(self, workers: Sequence[_Process]) -> bool:
        """Returns whether a worker has ended; raises if one has, soon, by an error."""
        gone = [(i, x.poll()) for i, x in enumerate(workers) if x.poll() is not None]
        for index, status in gone:
            log = self._logs[index]
            said = log.read_text("utf-8", "replace").strip().rpartition("\n")[2]
            how = f"Worker {index} {ending(status or 0)}. It said: {said} (in {log})"
            if status and status > 0 and not self._good.is_over:
                raise ClusterError(how)
            _say(how)
        return bool(gone)

    def _variables(self, listed: Sequence[str]) -> Iterator[dict[str, str]]:
        """Yields the environment variables of each process of the command."""
        options = self._options
        workers = {WORKERS_VARIABLE: ",".join(listed)}
        if options.replicas is None:
            yield workers
        for index in range(options.replicas or 0):
            if options.workers is None:
                yield {TF_CONFIG: Role(tuple(listed), index).tf_config}
            else:
                yield {**workers, REPLICA_VARIABLE: str(index)}


def delay_of_restart(in_a_row: int) -> float:
    """Returns the seconds before a restart, of those in a row: 0, 1, 2, 4 ... 30."""
    return min(30.0, 2.0 ** (in_a_row - 2)) if in_a_row > 1 else 0.0


_START = time.monotonic()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # Of a terminal that was closed.
        sys.stderr.write(f"[launch {time.monotonic() - _START:6.1f} s] {text}\n")
