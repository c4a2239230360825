"""The HTTP server of a member's health and sessions, which nobody can keep busy.

Each caller has a thread, for some seconds until it has a session. When all threads are
in use, the caller that has been silent longest makes way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import io
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tfgpipe.cluster import health
from tfgpipe.cluster.health import Deadline, Status

# Connections that are answered at a time; others are turned away.
MAX_CONNECTIONS = 128
# How long a request may take.
REQUEST_SECONDS = 10.0
_EVICTION_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a request for a session.

    Attributes:
        code: The HTTP status.
        status: The status of the member, or None for an error alone.
        serve: Holds the session, if it is granted, in the caller's thread. Calls its
            argument first, which answers and returns the connection.
    """

    code: int
    status: Status | None = None
    serve: Callable[[Callable[[], socket.socket]], None] | None = None


class Member(Protocol):
    """A process that others have sessions with."""

    def status(self) -> Status:
        """Returns its status."""

    def grant(self, asked: Mapping[str, Any], client: str) -> Answer:
        """Answers a request for a session, of a client by its address."""


class SessionServer(socketserver.ThreadingTCPServer):
    """Answers `GET /healthz` and `POST /session` for a member."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], member: Member) -> None:
        self.member = member
        # Of connections that have not asked yet, in the order in which they came.
        self._deadlines: dict[socket.socket, Deadline] = {}
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def keep(self, connection: socket.socket) -> None:
        """Lets a connection last from now on, beside those that are answered."""
        if self._deadlines.pop(connection, None):
            self._free.release()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread, for which the oldest caller makes way if need be."""
        if not self._free.acquire(blocking=False):
            oldest = list(self._deadlines)[:1]
            for connection in oldest:
                _end(connection)
            if not (oldest and self._free.acquire(timeout=_EVICTION_SECONDS)):
                self.shutdown_request(request)
                return
        self._deadlines[request] = Deadline(REQUEST_SECONDS)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers, and makes room for another."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.keep(request)

    def service_actions(self) -> None:
        """Ends connections that take too long to ask."""
        for request, deadline in list(self._deadlines.items()):
            if deadline.is_over:
                _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leaves those alone who speak something else."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: SessionServer
    timeout = REQUEST_SECONDS

    def setup(self) -> None:
        """Has a request end after some kilobytes."""
        super().setup()
        self.rfile = io.BufferedReader(_Limited(self.rfile, 4 * health.MAX_BYTES))

    def do_GET(self) -> None:
        """Answers with the status."""
        if self.path != health.HEALTH_PATH:
            self.send_error(404)
            return
        self._answer(200, self.server.member.status())

    def do_POST(self) -> None:
        """Holds a session, until one of both is gone."""
        if self.path != health.SESSION_PATH:
            self.send_error(404)
            return
        if self.headers.get_content_type() != "application/json":
            self.send_error(415)  # A form of some web page.
            return
        host, port = self.client_address
        answer = self.server.member.grant(self._message(), f"{host}:{port}")
        status = answer.status
        if status is None:
            self.send_error(answer.code)
        elif answer.serve is None:
            self._answer(answer.code, status)
        else:
            answer.serve(lambda: self._begin(status))

    def _begin(self, status: Status) -> socket.socket:
        """Grants a session, and returns its connection."""
        self.server.keep(self.connection)
        # The kernel gives a machine up that has not acknowledged for so long.
        self.connection.setsockopt(
            socket.IPPROTO_TCP,
            socket.TCP_USER_TIMEOUT,
            int(1000 * health.SILENCE_SECONDS),
        )
        self._answer(200, status)
        return self.connection

    def _message(self) -> dict[str, Any]:
        """Returns the request, or an empty object."""
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
        """Keeps requests out of the log."""


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


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
