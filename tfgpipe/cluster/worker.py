"""A worker: lends this host's devices to one client after the other.

    client  --- health port, HTTP ------->  worker (this process, without TensorFlow)
       |                                       |  starts, watches, ends
       +------- port, TensorFlow's gRPC --->  server (a process for each client)

A server that dies is started again, and so is one whose client is gone, so that the
next client finds an empty one. The connection of the client's session closes when its
server is gone: that is how the client knows.

Clients that are replicas have sessions with all workers. When one of them is gone all
workers start their servers again, so that the sessions of the other clients end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import IO, Any

from tfgpipe.cluster import addresses, health
from tfgpipe.cluster.addresses import parse_addresses
from tfgpipe.cluster.errors import EX_TEMPFAIL, exit_with_parent
from tfgpipe.cluster.health import Deadline, Status
from tfgpipe.cluster.session_server import Answer, SessionServer

LOOPBACK = ("127.0.0.1", "localhost")
# A server that fails this often in a row will not come up.
_MAX_FAILURES = 3
# How long a worker of a job waits for its client, which imports and reads meanwhile.
_FIRST_CLIENT_SECONDS = 600.0
_NO_CLIENT = f"no client has come within {_FIRST_CLIENT_SECONDS:.0f} s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The command line of a worker.

    Attributes:
        port: The port of TensorFlow's server; the next is for health.
        host: The address to listen on.
        devices: Into how many devices the CPU is split.
        cluster: The list of all workers, for clients that are replicas.
        index: The index of this one in it.
        once: True to end with its first client, which has to come within minutes: so
            does a process of a job that some engine has started.
        exits_with_parent: True to end once its standard input closes.

    Raises:
        ValueError: If the list does not have the port at the index.
    """

    port: int
    host: str = "127.0.0.1"
    devices: int = 1
    cluster: str | None = None
    index: int | None = None
    once: bool = False
    exits_with_parent: bool = False

    def __post_init__(self) -> None:
        """Checks the list."""
        if self.cluster is None and self.index is None:
            return
        found = () if self.cluster is None else parse_addresses(self.cluster)
        own = dict(enumerate(found)).get(-1 if self.index is None else self.index)
        if own is None or own.port != self.port:
            raise ValueError(
                "--cluster is the list of all workers, and --index the position of "
                f"this one in it, from 0, with the port of --port. Received "
                f"--cluster={self.cluster}, --index={self.index}, --port={self.port}."
            )

    @property
    def workers(self) -> str:
        """The list of all workers without spaces, or an empty string."""
        return ",".join(map(str, parse_addresses(self.cluster))) if self.cluster else ""

    @property
    def num_workers(self) -> int:
        """The number of all workers."""
        return len(parse_addresses(self.cluster)) if self.cluster else 1

    @property
    def listed(self) -> list[str]:
        """The flags of a server that has the list."""
        if not self.cluster:
            return []
        return [f"--cluster={self.workers}", f"--index={self.index}"]

    @property
    def command(self) -> list[str]:
        """The command line of these options."""
        flags = [name for name in ("once", "exits_with_parent") if getattr(self, name)]
        return [
            *(sys.executable, "-m", "tfgpipe.cluster", "worker"),
            *(f"--port={self.port}", f"--host={self.host}"),
            *(f"--devices={self.devices}", *self.listed),
            *(f"--{name}" for name in flags),
        ]

    @property
    def is_loopback(self) -> bool:
        """True if other hosts are to find the ports closed."""
        return self.host in LOOPBACK


def run(options: WorkerOptions) -> int:
    """Runs a worker until it is told to stop, and returns its exit status."""
    if options.exits_with_parent:
        exit_with_parent()
    for port in (options.port, options.port + 1):
        if addresses.is_taken(port):
            return _failed(
                f"Port {port} of this host is taken. A worker needs the port of "
                "--port and the next one; give another --port."
            )
    try:
        worker = _Worker(options)
    except OSError as error:
        return _failed(f"Cannot listen on {options.host}: {error.strerror}.")
    if not (options.is_loopback or addresses.own_token()):
        sys.stderr.write(
            "WARNING: Whoever reaches this worker can take it and keep it from others. "
            f"Set {addresses.TOKEN_VARIABLE} to a secret, the same here and for the "
            "client. TensorFlow's own port stays open to all: keep it in a private "
            "network.\n"
        )
    if options.is_loopback:
        sys.stderr.write(
            f"Port {options.port} is open to all networks for some milliseconds, until "
            "TensorFlow's socket is bound to the loopback interface. Who calls then "
            "is refused; a firewall or a network namespace keeps it closed.\n"
        )
    return worker.run()


class _Server:
    """The process of TensorFlow's server, for one client, or one of each replica.

    Attributes:
        devices: The number of its devices of each kind, once it is ready.
        clients: The addresses of the clients that have or had it, by replica.
        present: The replicas whose clients have it.
        num_replicas: Number of clients that are to have it, once one has.
        last_words: The reason of its end, which is reported to clients.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._heard = time.monotonic()
        self.devices: dict[str, int] = {}
        self.clients: dict[int, str] = {}
        self.present: set[int] = set()
        self.num_replicas = 0
        # Exit statuses of clients, by replica, of those that have said it.
        self.statuses: dict[int, int] = {}
        self.last_words = ""
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tfgpipe.cluster", "server"),
                *(f"--port={options.port}", f"--devices={options.devices}"),
                *(["--loopback"] if options.is_loopback else []),
                *options.listed,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        threading.Thread(
            target=self._listen, args=(self._process.stdout,), daemon=True
        ).start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_silent(self) -> bool:
        """True if it has been ready, and gives no sign of life."""
        silence = time.monotonic() - self._heard
        return bool(self.devices) and silence > health.SILENCE_SECONDS

    def exit_status_of_clients(self) -> int:
        """Returns the highest exit status of clients, 75 if one has not said it."""
        if not self.clients or self.statuses.keys() < self.clients.keys():
            return EX_TEMPFAIL
        return max(self.statuses.values())

    def exit_status(self) -> int | None:
        """Returns the status it has ended with, or None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _listen(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(ValueError, OSError):  # Closed by `end`.
            for line in stream:
                self._heard = time.monotonic()
                self.devices = json.loads(line)["devices"]


class _Worker:
    """The state that the threads of a worker share."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._name = uuid.uuid4().hex
        # Reasons to end a server, or with None the worker.
        self._events: queue.Queue[tuple[_Server | None, str]] = queue.Queue()
        self._mutex = threading.Lock()
        self._starts = self._failures = 0
        self._server: _Server | None = None
        self._token = addresses.own_token()
        self._health = SessionServer((options.host, options.port + 1), self)

    def run(self) -> int:
        for each in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, lambda *_: self._events.put((None, "")))
        threading.Thread(target=self._health.serve_forever, daemon=True).start()
        failures = 0
        try:
            while True:
                with self._mutex:
                    self._starts += 1
                    server = self._server = _Server(self._options)
                reason = self._watch(server)
                with self._mutex:
                    server.last_words = server.last_words or reason or "it stops"
                    self._server = None  # Which ends the sessions.
                server.end()
                if reason is None:
                    return 0
                if self._options.once and (server.clients or reason is _NO_CLIENT):
                    self._say(f"{reason}: it ends")
                    return server.exit_status_of_clients()
                failures = 0 if server.devices else failures + 1
                if failures == _MAX_FAILURES:
                    return _failed(f"TensorFlow's server does not come up: {reason}.")
                self._say(f"{reason}: starting TensorFlow's server anew")
        finally:
            self._health.server_close()
            if self._server:
                self._server.end()

    def status(self) -> Status:
        """Returns the worker's status."""
        server = self._server
        own = Status(
            worker=self._name,
            state="starting",
            starts=self._starts,
            failures=self._failures,
            workers=self._options.workers,
            index=self._options.index or 0,
        )
        if server is None or not server.devices:
            return own
        is_full = bool(server.clients) and len(server.clients) == server.num_replicas
        return dataclasses.replace(
            own,
            state="taken" if is_full else "ready",
            devices=server.devices,
            clients={str(d): client for d, client in server.clients.items()},
            num_replicas=server.num_replicas,
        )

    def grant(self, asked: Mapping[str, Any], client: str) -> Answer:
        """Gives the server to a client, if it is ready and the replica's is free."""
        if not addresses.accepts(asked.get("token"), self._token):
            return Answer(403, dataclasses.replace(self.status(), refused=True))
        replica, num_replicas = asked.get("replica", 0), asked.get("num_replicas", 1)
        are_counts = type(replica) is type(num_replicas) is int
        num_workers = self._options.num_workers
        if not (are_counts and 0 <= replica < num_replicas <= num_workers):
            return Answer(400)
        with self._mutex:
            status, server = self.status(), self._server
            if (
                server is None
                or status.state != "ready"
                or num_replicas != (server.num_replicas or num_replicas)
                or replica in server.clients
            ):
                return Answer(409, status)
            server.num_replicas = num_replicas
            server.clients[replica] = client
            server.present.add(replica)
            granted = dataclasses.replace(self.status(), granted=True)
        return Answer(200, granted, functools.partial(self._serve, server, replica))

    def _serve(
        self, server: _Server, replica: int, begin: Callable[[], socket.socket]
    ) -> None:
        """Holds a session; after a good-bye of its client others may go on."""
        told: set[int] = set()

        def news() -> bytes:
            left = {*server.clients} - server.present - told
            told.update(left)
            return health.beat(left=sorted(left))

        reason = "it has not come"
        try:
            connection = begin()
            reason = health.serve_session(
                connection,
                goes_on=lambda: self._server is server,
                news=news,
                on_status=lambda status: server.statuses.update({replica: status}),
            )
            if self._server is not server:
                connection.sendall(health.beat(end=server.last_words))
        finally:
            with self._mutex:
                server.present.discard(replica)
                if self._server is server and (reason or not server.present):
                    who = health.describe_client(
                        replica, server.clients, server.num_replicas
                    )
                    server.last_words = f"{who} is gone"
                    self._server = None  # No other client gets it.
                    self._events.put((server, server.last_words))

    def _watch(self, server: _Server) -> str | None:
        """Returns the reason of a server's end; None to stop for good."""
        announced = False
        first_client = Deadline(_FIRST_CLIENT_SECONDS)
        while True:
            with contextlib.suppress(queue.Empty):
                whose, reason = self._events.get(timeout=0.1)
                if whose is None:
                    if self._options.once and server.present:
                        continue  # Its client, which is to end as well, ends it.
                    return None
                if whose is server:
                    return reason
            status = server.exit_status()
            if status is not None:
                self._failures += 1
                return f"TensorFlow's server ended with status {status}"
            if server.is_silent:
                self._failures += 1
                return "TensorFlow's server gives no sign of life"
            if server.devices and not announced:
                announced = True
                self._say(f"ready: {_count(server.devices)}, process {server.pid}")
            if self._options.once and first_client.is_over and not server.clients:
                return _NO_CLIENT

    def _say(self, text: str) -> None:
        address = f"{self._options.host}:{self._options.port}"
        sys.stderr.write(f"worker {address}: {text}\n")
        sys.stderr.flush()


def _count(devices: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in devices.items())


def _failed(sentence: str) -> int:
    sys.stderr.write(f"{sentence}\n")
    return 2
