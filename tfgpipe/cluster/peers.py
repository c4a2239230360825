"""The rendezvous of processes that are replicas, and their health afterwards.

TensorFlow's runtime waits for processes that are not there, does not check that all
have one list of processes, and ends in whatever error it runs into when one is gone.
So before it starts, each process sends its index and its list to all before it, on the
port after its own; and by these connections, which stay open, each knows within a
second when another is gone, and by their heartbeats when one hangs.

    process 2  ── hello ──▶  process 1  ── hello ──▶  process 0
       └────────────────────── hello ────────────────────▲

A process that ends well says so, and the others go on. One that ends in any other way
leaves collectives that the others would wait for without end, so they end as well.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar

from tfgpipe.cluster import health
from tfgpipe.cluster.addresses import Address, parse_addresses
from tfgpipe.cluster.errors import (
    ClusterError,
    WorkerLost,
    WorkerUnavailable,
    end_process,
)
from tfgpipe.cluster.health import Deadline

_POLL_SECONDS = 0.2
# So that a process that ends well is not taken for one that is gone.
_GOODBYE = {"ends": "well"}
# How long an error may precede the news of the lost process that caused it.
_LOSS_SECONDS = 3.0
_MAX_BYTES = 4096


def rendezvous(workers: Sequence[str], index: int, *, seconds: float = 120.0) -> None:
    """Connects to the other processes; ends this one with status 75 when one is gone.

    At its end this process tells the others that it ends well, unless an error is not
    caught. See `report_exit` for one that ends by itself with another status than 0.

    Args:
        workers: The addresses of all, this one among them.
        index: The index of this one.
        seconds: How long to wait for them.

    Raises:
        ValueError: If the list is wrong.
        WorkerUnavailable: If one is not there by then.
        ClusterError: If one has another list, or runs another TensorFlow.
    """
    addresses = parse_addresses(workers)
    deadline = Deadline(seconds)
    ours = {
        "process": index,
        "workers": ",".join(map(str, addresses)),
        "tensorflow": health.version("tensorflow"),
    }
    connections: dict[int, socket.socket] = {}
    own = addresses[index]
    with _listener(own) as listener:
        for other in range(index):
            connections[other] = _call(other, addresses[other], ours, deadline)
        while len(connections) < len(addresses) - 1:
            _answer(listener, addresses, connections, ours, deadline)
    join(_Processes(connections, addresses))


def join(peers: Peers) -> None:
    """Has the other processes learn how this one ends.

    That is well, unless an error is not caught.
    """
    Peers.current = peers
    atexit.register(peers.leave, well=True)
    show = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        show(kind, error, trace)
        await_loss(error)
        leave(well=False)

    sys.excepthook = hook


@contextlib.contextmanager
def report_exit(accepted: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Tells the other processes, if any, whether they can go on without this one.

    They can if what is inside ends without an error, by `sys.exit()` or one of the
    accepted errors; otherwise they end with status 75.

    Example:

    ```python
    with tfgpipe.cluster.report_exit():
        sys.exit(main())
    ```

    Args:
        accepted: Errors that all processes run into by themselves.
    """
    well = False
    try:
        yield
        well = True
    except SystemExit as error:
        well = error.code in (None, 0)
        raise
    except accepted:
        well = True
        raise
    except Exception as error:
        await_loss(error)
        raise
    finally:
        leave(well=well)


def leave(*, well: bool) -> None:
    """Tells the other processes, if there are any, that this one is about to end.

    Args:
        well: Whether they can go on. Otherwise they end with status 75.
    """
    if Peers.current is not None:
        Peers.current.leave(well=well)


@contextlib.contextmanager
def needs_others() -> Iterator[None]:
    """A step of all replicas is inside, for clients of the same workers.

    Should another client have ended, this process would wait for it without end, and
    ends after 30 seconds; should one not take part in the step, after the
    `step_seconds` of `connect`. Steps of a `tfgpipe.PipelinedModel` do this by
    themselves.
    """
    if (peers := Peers.current) is None:
        yield
        return
    peers.waits_since = time.monotonic()
    try:
        yield
    finally:
        peers.waits_since = None


def await_loss(error: BaseException) -> None:
    """Waits for seconds, and ends this process with status 75 if another is gone.

    Args:
        error: Nothing is waited for unless it is TensorFlow's, which raises whatever it
            runs into when another process is gone.
    """
    peers = Peers.current
    if peers is None or not type(error).__module__.startswith("tensorflow."):
        return
    time.sleep(_LOSS_SECONDS)
    if ended := peers.ended():
        end_process(ended)


class Peers(abc.ABC):
    """The other processes that this one needs, and they it.

    Attributes:
        current: Those of this process, if it has any.
        waits_since: When this one began something that needs them, or None.
    """

    current: ClassVar[Peers | None] = None
    waits_since: float | None = None

    @abc.abstractmethod
    def leave(self, *, well: bool) -> None:
        """Says good-bye if this process ends well, and else breaks off."""

    @abc.abstractmethod
    def ended(self) -> WorkerLost | None:
        """Returns an error that names one that has ended well, or None."""


class _Processes(Peers):
    """Processes after the rendezvous."""

    def __init__(
        self, connections: Mapping[int, socket.socket], addresses: Sequence[Address]
    ) -> None:
        self._connections = tuple(connections.values())
        self._has_left = False
        # Index and address of those that have ended well.
        self._goodbyes: list[tuple[int, Address]] = []
        for other, connection in connections.items():
            arguments = (other, addresses[other], connection)
            threading.Thread(target=self._watch, args=arguments, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def ended(self) -> WorkerLost | None:
        """Returns an error that names one that has ended well, or None."""
        return _lost(*self._goodbyes[0], "it has ended") if self._goodbyes else None

    def leave(self, *, well: bool) -> None:
        """Says good-bye if this process ends well, and else breaks off."""
        if self._has_left:
            return
        self._has_left = True
        for connection in self._connections:
            with contextlib.suppress(OSError):
                if well:
                    _send(connection, _GOODBYE)
                connection.shutdown(socket.SHUT_WR if well else socket.SHUT_RDWR)

    def _beat(self) -> None:
        """Gives signs of life, by which the others know that this process runs."""
        while not self._has_left:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # It is gone, as `_watch` sees.
                    connection.sendall(b"\n")
            time.sleep(health.BEAT_SECONDS)

    def _watch(self, other: int, address: Address, connection: socket.socket) -> None:
        """Ends this process when another is gone without a good-bye."""
        connection.settimeout(health.SILENCE_SECONDS)
        try:
            if _receive(connection, after_beats=True) == _GOODBYE:
                self._goodbyes.append((other, address))
                return
            reason = "it says what it should not"
        except TimeoutError:
            reason = f"it has been silent for {health.SILENCE_SECONDS:.0f} s"
        except ConnectionError:
            reason = "it closed the connection"  # Or the kernel did.
        except (OSError, ValueError) as error:
            reason = str(error)
        if self._has_left:
            return  # This process is about to end by itself.
        end_process(_lost(other, address, reason))


def _listener(own: Address) -> socket.socket:
    host = own.host if own.is_loopback else ""
    try:
        return socket.create_server((host, own.health_port))
    except OSError as error:
        raise ClusterError(
            f"Port {own.health_port}, the one after this process' own in TF_CONFIG, is "
            f"taken: {error.strerror}. List a port that is free, as the next one is."
        ) from error


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, *, after_beats: bool = False) -> dict[str, Any]:
    """Returns the next line of JSON.

    Args:
        connection: Where from.
        after_beats: Whether heartbeats, which are empty lines, may come before it.

    Raises:
        OSError: If none comes.
        ValueError: If it is not a JSON object of a few kilobytes.
    """
    line = b""
    while not line.endswith(b"\n"):
        # One at a time: what follows is read later, from the same socket.
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("it closed the connection")
        line += byte
        if after_beats and line == b"\n":
            line = b""
        if len(line) > _MAX_BYTES:
            break
    return health.parse_message(line)


def _call(
    other: int, address: Address, ours: Mapping[str, Any], deadline: Deadline
) -> socket.socket:
    """Returns a connection to a process that was there before, or is to come."""
    while True:
        connection = None
        try:
            connection = socket.create_connection(
                (address.host, address.health_port), timeout=deadline.left
            )
            _send(connection, ours)
            _check(other, address, _receive(connection), ours)
        except (OSError, ValueError) as error:
            if connection is not None:
                connection.close()
            if deadline.is_over:
                raise _missing(other, address, deadline, str(error)) from error
            time.sleep(_POLL_SECONDS)
        else:
            return connection


def _answer(
    listener: socket.socket,
    addresses: Sequence[Address],
    connections: dict[int, socket.socket],
    ours: Mapping[str, Any],
    deadline: Deadline,
) -> None:
    """Waits for a caller, and adds the connection if it is one of the processes."""
    listener.settimeout(deadline.left)
    try:
        connection, _ = listener.accept()
    except TimeoutError as error:
        missing = min({*range(len(addresses))} - {ours["process"], *connections})
        reason = "it has not called"
        raise _missing(missing, addresses[missing], deadline, reason) from error
    connection.settimeout(deadline.left)
    try:
        theirs = _receive(connection)
        _send(connection, ours)
    except (OSError, ValueError):
        connection.close()  # Whoever it was, it is none of us.
        return
    index = theirs.get("process")
    other = index if isinstance(index, int) and 0 <= index < len(addresses) else 0
    _check(other, addresses[other], theirs, ours)
    connections[other] = connection


def _check(
    other: int, address: Address, theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> None:
    """Raises ClusterError if what a process says does not fit."""
    if theirs.get("workers") != ours["workers"]:
        raise ClusterError(
            "All processes must be told the same list of workers, in one order. "
            f"Received {ours['workers']} here, and {theirs.get('workers')} in process "
            f'{other} at {address}. Give TF_CONFIG the same "cluster" everywhere.'
        )
    if theirs.get("tensorflow") != ours["tensorflow"]:
        raise ClusterError(
            f"Process {other} at {address} has TensorFlow {theirs.get('tensorflow')}; "
            f"this process has {ours['tensorflow']}. Install the same version on both."
        )
    if theirs.get("process") == ours["process"]:
        raise ClusterError(
            f"Two processes are told that they are process {other} at {address}. Give "
            'each an "index" of its own in TF_CONFIG.'
        )


def _lost(other: int, address: Address, reason: str) -> WorkerLost:
    return WorkerLost(
        f"Process {other} at {address} is gone: {reason}. This process, {os.getpid()}, "
        "cannot go on without it. Start all again, from their last checkpoint."
    )


def _missing(
    other: int, address: Address, deadline: Deadline, reason: str
) -> WorkerUnavailable:
    return WorkerUnavailable(
        f"Process {other} at {address} is not there after {deadline.seconds:.0f} s: "
        f"{reason}. Is it started, with the same TF_CONFIG but for its index, and are "
        f"ports {address.port} and {address.health_port} open between the hosts?"
    )
