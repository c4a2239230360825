"""Supervisor: workers and a command that uses them, restarted when one of them dies.

A worker that dies is started again. The command cannot go on without it: it
ends, by `tfgpipe.cluster.connect` with status 75 at the latest, and is started again as
well, as it is after status 42, that of a trainer which was asked to stop. What it has
done until then it has to find in its own checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfgpipe.cluster import addresses, health
from tfgpipe.cluster.addresses import REPLICA_VARIABLE, WORKERS_VARIABLE, Address
from tfgpipe.cluster.errors import EX_TEMPFAIL, EXIT_PREEMPTED, ClusterError
from tfgpipe.cluster.groups import Groups
from tfgpipe.cluster.health import Deadline, wait_until_ready

_POLL_SECONDS = 0.05
_HEALTH_SECONDS = 2.0
# What looks after everything waits so long for a worker that hangs.
_ASK_SECONDS = 1.0
# How long a command may take to end by itself after a signal.
_GRACE_SECONDS = 30.0
# How long a replica may take to end after others have lost it.
_LOSS_SECONDS = 5.0
# What runs that long has had a good start: delays of restarts begin anew.
_GOOD_SECONDS = 60.0
_MAX_DELAY = 30.0
# Exit codes of a command that asks for a restart.
_RESTARTED = (EX_TEMPFAIL, EXIT_PREEMPTED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The command line of the supervisor.

    Attributes:
        command: The program, and its arguments.
        workers: Number of workers to start, or None.
        replicas: Number of processes of the command, or None for one: with
            workers see `tfgpipe.cluster.connect`, without
            `tfgpipe.MultiWorkerPipelineStrategy`.
        cluster: The workers to use that run already, or None.
        devices: Into how many devices each worker splits its CPU.
        max_restarts: Most restarts of the command.
        start_limit: Seconds for the workers to be ready.
        time_limit: Seconds for everything, or 0.
        log_dir: The folder of the workers' logs, or None for a new one.

    Raises:
        ValueError: If there is nothing to start, or workers are not for the replicas.
    """

    command: Sequence[str]
    workers: int | None = None
    replicas: int | None = None
    cluster: str | None = None
    devices: int = 1
    max_restarts: int = 10
    start_limit: float = 120.0
    time_limit: float = 0.0
    log_dir: str | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        num_workers = self.workers
        if self.cluster is not None:
            num_workers = len(addresses.parse_addresses(self.cluster))
        if num_workers is not None:
            addresses.replica_workers(num_workers, 0, self.replicas or 1)
        elif self.replicas is None:
            raise ValueError("one of --workers, --cluster and --replicas is required")


def run(options: LaunchOptions) -> int:
    """Runs a command with its workers, and returns its exit status."""
    supervisor = _Supervisor(options)
    try:
        with supervisor.catching_signals():
            return supervisor.run()
    except _Stop as stop:
        return stop.status
    except ClusterError as error:
        _say(str(error))
        return 2
    finally:
        supervisor.end()


class _Stop(Exception):  # noqa: N818
    """Everything is to end, with `status`."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Backoff:
    """Delays of restarts, exponential: 0, 1, 2, 4 ... seconds."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def next(self, lived: float) -> float:
        """Returns the seconds to wait for what has lived for some."""
        self._in_a_row = 1 if lived > _GOOD_SECONDS else self._in_a_row + 1
        return min(_MAX_DELAY, 2.0 ** (self._in_a_row - 2) if self._in_a_row > 1 else 0)


class _SupervisedWorker:
    """The health of a worker, and its process if it is started here.

    It has a log, the file of its output, unless others have started it.
    """

    def __init__(
        self,
        index: int,
        address: Address,
        groups: Groups,
        *,
        devices: int = 1,
        cluster: str | None = None,
        log: Path | None = None,
    ) -> None:
        self.index = index
        self.address = address
        self._groups = groups
        self._devices = devices
        self._cluster = cluster
        self._log = log
        self._backoff = _Backoff()
        self._next_ask = Deadline(0)
        self._started = self._due = self._answered = 0.0
        self._restarts = self._server_failures = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __str__(self) -> str:
        return f"Worker {self.index} at {self.address}"

    @property
    def num_failures(self) -> int:
        """Number of times that it, or a TensorFlow server in it, has died."""
        return self._restarts + self._server_failures

    def ask(self) -> None:
        """Asks for its health."""
        with contextlib.suppress(OSError, ValueError):
            status = health.ask(self.address, seconds=_ASK_SECONDS)
            self._answered = time.monotonic()
            self._server_failures = status.failures

    def check(self, *, restart: bool) -> None:
        """Starts its process, if it is one of ours that has not started or has died.

        Raises:
            ClusterError: If it has died and is not to be restarted.
        """
        if self._log is None:
            return
        if self._process is None:
            if time.monotonic() >= self._due:
                self._process = self._start(self._log)
            return
        if self._next_ask.is_over:
            self._next_ask = Deadline(_HEALTH_SECONDS)
            self.ask()
        silence = time.monotonic() - self._answered
        if self._process.poll() is not None:
            how = _ending(self._process.returncode)
        elif silence >= health.SILENCE_SECONDS:
            how = f"has not answered for {silence:.0f} s"
        else:
            return
        self.end()
        if not restart:
            lines = self._log.read_text("utf-8", "replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "")
            printed = f" It said: {last} (in {self._log})" if last else ""
            raise ClusterError(f"{self} {how} before it was ready.{printed}")
        self._restarts += 1
        delay = self._backoff.next(time.monotonic() - self._started)
        self._due = time.monotonic() + delay
        _say(f"{self} {how}: starting it again{_in(delay)}.")

    def end(self) -> None:
        """Ends its process, and what that has started."""
        if self._process is not None:
            self._groups.end(self._process)
            self._process = None

    def _start(self, log: Path) -> subprocess.Popen[bytes]:
        self._started = self._answered = time.monotonic()
        listed = [f"--cluster={self._cluster}", f"--index={self.index}"]
        with log.open("ab") as output:
            return self._groups.start(
                [
                    *(sys.executable, "-m", "tfgpipe.cluster", "worker"),
                    *(f"--port={self.address.port}", f"--devices={self._devices}"),
                    *(listed if self._cluster is not None else []),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )


class _Supervisor:
    """The workers and the command."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._limit = Deadline(options.time_limit) if options.time_limit else None
        self._signal = 0
        self._groups = Groups()
        # Of reserved ports.
        self._stack = contextlib.ExitStack()
        # One, or one for each replica.
        self._commands: list[subprocess.Popen[bytes]] = []
        self._backoff = _Backoff()
        self._workers: list[_SupervisedWorker] = []

    def run(self) -> int:
        """Returns the exit status of the command."""
        options = self._options
        if options.workers is not None:
            self._start_workers(options.workers)
        elif options.cluster is not None:
            found = addresses.parse_addresses(options.cluster)
            self._workers.extend(
                _SupervisedWorker(*each, self._groups) for each in enumerate(found)
            )
        # Later the command waits for the workers itself, and starts meanwhile.
        self._wait_until_ready()
        restarts = 0
        while True:
            self._ask()
            failures = self._num_failures()
            started = time.monotonic()
            status = self._attempt()
            if status not in (0, *_RESTARTED):
                self._ask()
            worker_failed = self._num_failures() > failures
            if not (status in _RESTARTED or status < 0 or (status and worker_failed)):
                return status
            how = _ending(status)
            if restarts == options.max_restarts:
                _say(f"The command {how}, and --max_restarts={restarts} are used up.")
                return status if status > 0 else 128 - status
            restarts += 1
            delay = self._backoff.next(time.monotonic() - started)
            _say(
                f"The command {how}: starting it again, {restarts} of "
                f"{options.max_restarts}{',' if delay else ''}{_in(delay)}."
            )
            pause = Deadline(delay)
            while delay and not pause.is_over:
                self._check()
                time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """Ends everything that was started."""
        self._end_commands()
        for worker in self._workers:
            worker.end()
        self._groups.close()
        self._stack.close()

    def _end_commands(self) -> None:
        for command in self._commands:
            self._groups.end(command)
        self._commands.clear()

    @contextlib.contextmanager
    def catching_signals(self) -> Iterator[None]:
        """Records signals that ask for the end, for `run` to see."""

        def record(signum: int, _: object) -> None:
            self._signal = signum

        taken = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # As under `nohup`.
            taken.append(signal.SIGHUP)
        before = {number: signal.signal(number, record) for number in taken}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _start_workers(self, num_workers: int) -> None:
        options = self._options
        folder = Path(options.log_dir or tempfile.mkdtemp(prefix="tfgpipe-launch-"))
        folder.mkdir(parents=True, exist_ok=True)
        _say(f"Starting {num_workers} workers; their logs are in {folder}.")
        ports = addresses.reserve_ports(num_workers, self._stack)
        listed = ",".join(f"127.0.0.1:{port}" for port in ports)
        for index, port in enumerate(ports):
            worker = _SupervisedWorker(
                index,
                Address("127.0.0.1", port),
                self._groups,
                devices=options.devices,
                cluster=listed if options.replicas is not None else None,
                log=folder / f"worker-{index}.log",
            )
            self._workers.append(worker)
            worker.check(restart=False)

    def _wait_until_ready(self) -> None:
        deadline = Deadline(self._options.start_limit)
        before = time.monotonic()
        for worker in self._workers:
            wait_until_ready(
                worker.index,
                worker.address,
                deadline,
                check=lambda: self._check(restart=False),
            )
        if self._workers:
            seconds = time.monotonic() - before
            _say(f"{len(self._workers)} workers are ready, after {seconds:.1f} s.")

    def _attempt(self) -> int:
        """Runs the command once, and returns its exit status, negative for a signal.

        Of several replicas none goes on without the others, so the first failure ends
        all, and is theirs.
        """
        try:
            for variables in self._variables():
                self._commands.append(
                    self._groups.start(
                        self._options.command, env={**os.environ, **variables}
                    )
                )
        except OSError as error:
            raise ClusterError(
                f"Cannot run {self._options.command[0]}: {error.strerror}."
            ) from None
        loss: Deadline | None = None
        while True:
            ended = [command.poll() for command in self._commands]
            failed = [status for status in ended if status]
            if None not in ended or any(status != EX_TEMPFAIL for status in failed):
                break
            if failed:
                # It has lost another, which may be about to end with its own status.
                loss = loss or Deadline(_LOSS_SECONDS)
                if loss.is_over:
                    break
            self._check()
            time.sleep(_POLL_SECONDS)
        if failed and None in ended:
            replica = ended.index(min(failed))
            _say(f"Replica {replica} {_ending(min(failed))}: ending the others.")
        self._end_commands()
        # One that is killed goes before those that fail because of it.
        return min(failed, default=0)

    def _variables(self) -> Iterator[dict[str, str]]:
        """Yields the environment variables of each process of the command."""
        listed = {WORKERS_VARIABLE: ",".join(str(x.address) for x in self._workers)}
        if self._options.replicas is None:
            yield listed
            return
        if self._workers:
            for replica in range(self._options.replicas):
                yield {**listed, REPLICA_VARIABLE: str(replica)}
            return
        self._stack.close()  # Of the attempt before.
        ports = addresses.reserve_ports(self._options.replicas, self._stack)
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
        for index in range(self._options.replicas):
            task = {"type": "worker", "index": index}
            yield {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}

    def _check(self, *, restart: bool = True) -> None:
        """Looks after the workers, the time and signals.

        Raises:
            _Stop: If everything is to end.
            ClusterError: If a worker has died, unless they are to `restart`.
        """
        if self._signal:
            raise _Stop(self._forward(self._signal))
        if self._limit is not None and self._limit.is_over:
            _say(f"--time_limit={self._limit.seconds:.0f} is over: ending everything.")
            raise _Stop(124)
        for worker in self._workers:
            worker.check(restart=restart)

    def _forward(self, signum: int) -> int:
        """Passes a signal on to the command, and returns the status to end with."""
        _say(f"{signal.Signals(signum).name}: ending everything.")
        for command in self._commands:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.pid, signum)
        grace = Deadline(_GRACE_SECONDS)
        while not grace.is_over and any(c.poll() is None for c in self._commands):
            time.sleep(_POLL_SECONDS)
        statuses = [command.poll() for command in self._commands]
        own = [status for status in statuses if status is not None and status >= 0]
        return max(own) if own and len(own) == len(statuses) else 128 + signum

    def _num_failures(self) -> int:
        return sum(worker.num_failures for worker in self._workers)

    def _ask(self) -> None:
        for worker in self._workers:
            worker.ask()


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _in(delay: float) -> str:
    return f" in {delay:.0f} s" if delay else ""


_START = time.monotonic()


def _say(text: str) -> None:
    seconds = time.monotonic() - _START
    sys.stderr.write(f"[launch {seconds:6.1f} s] {text}\n")
    sys.stderr.flush()
