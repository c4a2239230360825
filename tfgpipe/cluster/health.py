"""How a worker tells how it is: a line of JSON asked, a line of JSON answered.

    -> {"ask": "status"}
    <- {"worker": "5f0c", "state": "ready", "tensorflow": "2.21.0", ...}
    -> {"ask": "session", "token": "..."}

A client that wants the worker for itself asks for a `"session"` and keeps the
connection open. While it lives the worker sends an empty line every second, so that
each side knows within seconds when the other is gone: a process that has ended by the
closed connection, a machine or a network that is down by the silence.

Nothing but text and numbers is read from a peer, and no more than a few kilobytes.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import socket
import time
from collections.abc import Mapping
from typing import Any, Literal, get_args

from tfgpipe.cluster.addresses import Address

State = Literal["starting", "ready", "taken"]

BEAT_SECONDS = 1.0
# A machine that swaps is slow, and not gone.
SILENCE_SECONDS = 30.0
_LONGEST = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """How a worker is.

    Attributes:
        worker: A name that no other worker has.
        state: Whether it can be had.
        granted: Whether it is the asking client's from now on.
        refused: Whether it is not to be the client's, which has another token.
        starts: How often TensorFlow has been started in it.
        failures: How often it has died by itself.
        devices: How many devices of each kind it has; none before it is ready.
        tensorflow: A version.
        tfgpipe: Likewise.
        python: Likewise.
        client: The address of the client that has it, or an empty string.
    """

    worker: str
    state: State
    granted: bool = False
    refused: bool = False
    starts: int = 0
    failures: int = 0
    devices: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tensorflow: str = dataclasses.field(default_factory=lambda: version("tensorflow"))
    tfgpipe: str = dataclasses.field(default_factory=lambda: version("tfgpipe"))
    python: str = dataclasses.field(default_factory=platform.python_version)
    client: str = ""


def version(distribution: str) -> str:
    """Returns the version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def ask(address: Address, *, seconds: float) -> Status:
    """Returns how a worker is.

    Raises:
        OSError: If nothing answers within `seconds`.
        ValueError: If what answers is no worker.
    """
    connection, status = request(address, {"ask": "status"}, seconds=seconds)
    connection.close()
    return status


def request(
    address: Address, message: Mapping[str, str], *, seconds: float
) -> tuple[socket.socket, Status]:
    """Asks a worker, and returns the open connection and what it answered.

    Raises:
        OSError, ValueError: As `ask` does.
    """
    connection = socket.create_connection(
        (address.host, address.health_port), timeout=seconds
    )
    try:
        send(connection, message)
        return connection, _status(receive(connection))
    except BaseException:
        connection.close()
        raise


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Sends a line."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def beat(connection: socket.socket) -> None:
    """Sends a sign of life: an empty line."""
    connection.sendall(b"\n")


def receive(
    connection: socket.socket,
    *,
    after_beats: bool = False,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Returns a line that has been sent.

    Args:
        connection: Where from.
        after_beats: Whether empty lines may come before it.
        seconds: How long all of it may take; None leaves it to the connection how long
            each byte may.

    Raises:
        OSError: If none comes.
        ValueError: If it is not a JSON object of a few kilobytes.
    """
    line = b""
    end = None if seconds is None else time.monotonic() + seconds
    while not line.endswith(b"\n"):
        if end is not None:
            connection.settimeout(max(0.001, end - time.monotonic()))
        # One at a time, since heartbeats may follow: this happens once a connection.
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("it closed the connection")
        if after_beats and byte == b"\n" and not line:
            continue
        line += byte
        if len(line) > _LONGEST:
            raise ValueError("what it says is no line of JSON")
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ValueError("what it says is no line of JSON")
    return message


def _status(message: Mapping[str, Any]) -> Status:
    """Returns a status from what a peer says it is.

    Raises:
        ValueError: If it says anything else.
    """
    texts = ("worker", "state", "tensorflow", "tfgpipe", "python", "client")
    numbers = ("starts", "failures")
    devices = message.get("devices")
    if (
        any(not isinstance(message.get(name), str) for name in texts)
        or message["state"] not in get_args(State)
        or any(type(message.get(name)) is not int for name in numbers)
        or not isinstance(devices, dict)
        or any(type(number) is not int for number in devices.values())
    ):
        raise ValueError("what it says is not what a worker says")
    return Status(
        **{name: message[name] for name in (*texts, *numbers)},
        granted=message.get("granted") is True,
        refused=message.get("refused") is True,
        devices=devices,
    )
