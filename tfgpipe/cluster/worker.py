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
import http.server
import io
import json
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from typing import IO, Any

from tfgpipe.cluster import addresses, health, tcp_server
from tfgpipe.cluster.addresses import parse_addresses
from tfgpipe.cluster.health import Deadline, Status
from tfgpipe.cluster.tcp_server import TCPServer

LOOPBACK = ("127.0.0.1", "localhost")
# A server that fails this often in a row will not come up.
_MAX_FAILURES = 3
_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command line of a worker.

    Attributes:
        port: The port of TensorFlow's server; the next is for health.
        host: The address to listen on.
        devices: Into how many devices the CPU is split.
        cluster: The list of all workers, for clients that are replicas.
        index: The index of this one in it.

    Raises:
        ValueError: If the list does not have the port at the index.
    """

    port: int
    host: str = "127.0.0.1"
    devices: int = 1
    cluster: str | None = None
    index: int | None = None

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
    def is_loopback(self) -> bool:
        """Whether other hosts are to find the ports closed."""
        return self.host in LOOPBACK


def run(options: Options) -> int:
    """Runs a worker until it is told to stop, and returns its exit status."""
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
    return worker.run()


class _Server:
    """The process of TensorFlow's server, for one client, or one of each replica.

    Attributes:
        devices: The number of its devices of each kind, once it is ready.
        clients: The addresses of the clients that have or had it, by replica.
        present: The replicas whose clients have it.
        num_replicas: How many clients are to have it, once one has.
        last_words: Why it ends, which the clients are told.
    """

    def __init__(self, options: Options) -> None:
        self._heard = time.monotonic()
        self.devices: dict[str, int] = {}
        self.clients: dict[int, str] = {}
        self.present: set[int] = set()
        self.num_replicas = 0
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
        """Whether it has been ready, and gives no sign of life."""
        silence = time.monotonic() - self._heard
        return bool(self.devices) and silence > health.SILENCE_SECONDS

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
    """What the threads of a worker share."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._name = uuid.uuid4().hex
        # Reasons to end a server, or with None the worker.
        self._events: queue.Queue[tuple[_Server | None, str]] = queue.Queue()
        self._mutex = threading.Lock()
        self._starts = self._failures = 0
        self._server: _Server | None = None
        self._health = _HealthServer((options.host, options.port + 1), self)

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
                failures = 0 if server.devices else failures + 1
                if failures == _MAX_FAILURES:
                    return _failed(f"TensorFlow's server does not come up: {reason}.")
                self._say(f"{reason}: starting TensorFlow's server anew")
        finally:
            self._health.server_close()
            if self._server:
                self._server.end()

    @property
    def num_workers(self) -> int:
        """The number of workers in its list, which bounds that of replicas."""
        return self._options.num_workers

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

    def grant(
        self, client: str, *, replica: int, num_replicas: int
    ) -> tuple[Status, _Server | None]:
        """Gives the server to a client, if it is ready and the replica's is free."""
        with self._mutex:
            status, server = self.status(), self._server
            if server is None or status.state != "ready":
                return status, None
            if num_replicas != (server.num_replicas or num_replicas):
                return status, None
            if replica in server.clients:
                return status, None
            server.num_replicas = num_replicas
            server.clients[replica] = client
            server.present.add(replica)
            return dataclasses.replace(self.status(), granted=True), server

    def keep(self, server: _Server, connection: socket.socket) -> bool:
        """Returns whether a client has ended well, once it or the server is gone."""
        well = False
        told: set[int] = set()
        beat = Deadline(0)
        with contextlib.suppress(OSError):
            while self._server is server:
                readable, _, _ = select.select([connection], [], [], _POLL_SECONDS)
                if readable:
                    said = connection.recv(1024)
                    if not said:
                        return well
                    well = well or said.endswith(health.GOODBYE)
                if beat.is_over:
                    left = {*server.clients} - server.present - told
                    told |= left
                    connection.sendall(health.beat(left=sorted(left)))
                    beat = Deadline(health.BEAT_SECONDS)
            connection.sendall(health.beat(end=server.last_words))
        return well

    def take_back(self, server: _Server, replica: int, *, well: bool) -> None:
        """Ends a session; if the client has ended well, other clients may go on."""
        with self._mutex:
            server.present.discard(replica)
            if self._server is not server or (well and server.present):
                return
            who = health.describe_client(replica, server.clients, server.num_replicas)
            server.last_words = f"{who} is gone"
            self._server = None  # No other client gets it.
            self._events.put((server, server.last_words))

    def _watch(self, server: _Server) -> str | None:
        """Returns why a server is to be ended, or has ended; None to stop for good."""
        announced = False
        while True:
            with contextlib.suppress(queue.Empty):
                whose, reason = self._events.get(timeout=0.1)
                if whose is None:
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

    def _say(self, text: str) -> None:
        address = f"{self._options.host}:{self._options.port}"
        sys.stderr.write(f"worker {address}: {text}\n")
        sys.stderr.flush()


class _HealthServer(TCPServer):
    def __init__(self, address: tuple[str, int], worker: _Worker) -> None:
        self.worker = worker
        self.token = addresses.own_token()
        super().__init__(address, _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _HealthServer
    timeout = tcp_server.REQUEST_SECONDS

    def setup(self) -> None:
        """Has a request end after some kilobytes."""
        super().setup()
        self.rfile = io.BufferedReader(_Limited(self.rfile, 4 * health.MAX_BYTES))

    def do_GET(self) -> None:
        """Answers with the status."""
        if self.path != health.HEALTH_PATH:
            self.send_error(404)
            return
        self._answer(200, self.server.worker.status())

    def do_POST(self) -> None:
        """Gives the worker to the client, until one of them is gone."""
        if self.path != health.SESSION_PATH:
            self.send_error(404)
            return
        if self.headers.get_content_type() != "application/json":
            self.send_error(415)  # A form of some web page.
            return
        worker, asked = self.server.worker, self._message()
        if not addresses.accepts(asked.get("token"), self.server.token):
            self._answer(403, dataclasses.replace(worker.status(), refused=True))
            return
        replica, num_replicas = asked.get("replica", 0), asked.get("num_replicas", 1)
        are_counts = type(replica) is type(num_replicas) is int
        if not (are_counts and 0 <= replica < num_replicas <= worker.num_workers):
            self.send_error(400)
            return
        host, port = self.client_address
        status, server = worker.grant(
            f"{host}:{port}", replica=replica, num_replicas=num_replicas
        )
        if server is None:
            self._answer(409, status)
            return
        well = False
        try:
            self.server.keep(self.connection)
            # The kernel gives a machine up that has not acknowledged for so long.
            self.connection.setsockopt(
                socket.IPPROTO_TCP,
                socket.TCP_USER_TIMEOUT,
                int(1000 * health.SILENCE_SECONDS),
            )
            self._answer(200, status)
            well = worker.keep(server, self.connection)
        finally:
            worker.take_back(server, replica, well=well)

    def _message(self) -> dict[str, Any]:
        """Returns what is asked, or an empty object."""
        size = self.headers.get("Content-Length", "")
        line = self.rfile.read(
            min(int(size), health.MAX_BYTES) if size.isdecimal() else 0
        )
        with contextlib.suppress(ValueError):
            return health.parse_message(line)
        return {}

    def _answer(self, code: int, status: Status) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(status.to_json())

    def log_message(self, *arguments: Any) -> None:
        """Keeps requests out of the worker's log."""


class _Limited(io.RawIOBase):
    """A stream that ends after some bytes."""

    def __init__(self, stream: io.BufferedIOBase, size: int) -> None:
        self._stream, self._left = stream, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read1(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)

    def close(self) -> None:
        super().close()
        self._stream.close()


def _count(devices: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in devices.items())


def _failed(sentence: str) -> int:
    sys.stderr.write(f"{sentence}\n")
    return 2
