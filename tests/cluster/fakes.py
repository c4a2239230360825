"""A worker that answers as told, for what real ones do too seldom or too slowly."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator

from tfgpipe.cluster.addresses import Address, free_ports
from tfgpipe.cluster.health import Status


def status(**other) -> Status:
    ready = Status(worker="fake", state="ready", devices={"CPU": 1})
    return dataclasses.replace(ready, **other)


def http(body: bytes) -> bytes:
    return b"HTTP/1.0 200 OK\r\n\r\n" + body


@contextlib.contextmanager
def answering(answer: Status | bytes) -> Iterator[Address]:
    """Yields the address of a worker that answers everything with this."""
    said = http(answer.to_json()) if isinstance(answer, Status) else answer
    address = Address("127.0.0.1", free_ports(1)[0])
    listening = socket.create_server((address.host, address.health_port))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(4096)
                    connection.sendall(said)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield address
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
