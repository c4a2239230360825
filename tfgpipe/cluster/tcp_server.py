"""A TCP server that nobody can keep busy: a thread for each caller, for some seconds.

When all threads are in use, the caller that has been silent longest makes way.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from typing import Any

from tfgpipe.cluster.health import Deadline

# Connections that are answered at a time; others are turned away.
MAX_CONNECTIONS = 128
# How long a request may take.
REQUEST_SECONDS = 10.0
_EVICTION_SECONDS = 1.0


class TCPServer(socketserver.ThreadingTCPServer):
    """A server whose callers have some seconds to say what they want."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[socketserver.BaseRequestHandler],
    ) -> None:
        # Of connections that have not asked yet, in the order in which they came.
        self._deadlines: dict[socket.socket, Deadline] = {}
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def keep(self, connection: socket.socket) -> None:
        """Lets a connection last from now on."""
        del self._deadlines[connection]

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
        """Answers, and frees the thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._deadlines.pop(request, None)
            self._free.release()

    def service_actions(self) -> None:
        """Ends connections that take too long to ask."""
        for request, deadline in list(self._deadlines.items()):
            if deadline.is_over:
                _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leaves those alone who speak something else."""


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
