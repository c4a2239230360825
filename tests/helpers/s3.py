"""A server of S3 on loopback, and a proxy before it that fails as networks do."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

_UNAVAILABLE = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class Proxy:
    """Hands connections on to a server.

    Attributes:
        port: Its port.
        num_refused: Requests that are still to be answered by 503.
        num_cut: Connections that are still to be cut amid what is sent.
        cut_after: Bytes that are sent before.
        delay: Seconds that each piece takes.
        is_gone: True to refuse every connection.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_refused = self.num_cut = 0
        self.cut_after = 2000
        self.delay = 0.0
        self.is_gone = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            if self.is_gone:
                return
            if self.num_refused > 0:
                self.num_refused -= 1
                client.recv(65536)
                client.sendall(_UNAVAILABLE)
                return
            with socket.create_connection(("127.0.0.1", self._server)) as server:
                back = threading.Thread(
                    target=self._hand_on, args=[server, client], daemon=True
                )
                back.start()
                self._hand_on(client, server, sends=True)
                back.join()

    def _hand_on(
        self, source: socket.socket, target: socket.socket, *, sends: bool = False
    ) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                time.sleep(self.delay)
                sent += len(data)
                if sends and self.num_cut > 0 and sent > self.cut_after:
                    self.num_cut -= 1
                    break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def variables(port: int) -> dict[str, str]:
    """Returns the environment of programs that take the server on a port for S3."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@contextlib.contextmanager
def served() -> Iterator[int]:
    """Runs a server, and yields its port."""
    from moto.server import ThreadedMotoServer

    server: Any = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()
