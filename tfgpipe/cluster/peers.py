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
import select
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar

from tfgpipe.cluster import health, tcp_server
from tfgpipe.cluster.addresses import (
    TOKEN_VARIABLE,
    Address,
    accepts,
    own_token,
    parse_addresses,
)
from tfgpipe.cluster.errors import (
    ClusterError,
    WorkerLost,
    WorkerUnavailable,
    end_process,
)
from tfgpipe.cluster.health import Deadline
from tfgpipe.cluster.tcp_server import TCPServer

_POLL_SECONDS = 0.2
# So that a process that ends well is not taken for one that is gone.
_GOODBYE = {"ends": "well"}
# How long an error may precede the news of the lost process that caused it.
_LOSS_SECONDS = 3.0
_MAX_BYTES = 4096


def rendezvous(workers: Sequence[str], index: int, *, seconds: float = 120.0) -> None:
    """Connects to the other processes; ends this one with status 75 when one is gone.

    If the environment variable TFGPIPE_TOKEN is set, it has to be the same in all.
    Whoever else calls meanwhile is turned away, and changes nothing.

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
        "token": own_token(),
    }
    with _listening(addresses, ours) as callers:
        connections = {
            other: _call(other, addresses[other], ours, deadline)
            for other in range(index)
        }
        connections |= callers.wait(deadline)
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


class _Callers(TCPServer):
    """Those that call for the rendezvous, each heard in a thread of its own."""

    def __init__(self, addresses: Sequence[Address], ours: Mapping[str, Any]) -> None:
        self._addresses = addresses
        self._ours = ours
        self._found: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        # Why the last caller was turned away, if it may have been one of the processes.
        self._reason = ""
        own = addresses[ours["process"]]
        super().__init__(
            ("" if not own.is_loopback else own.host, own.health_port), _Caller
        )

    def answer(self, theirs: Mapping[str, Any], connection: socket.socket) -> None:
        """Takes the connection of a process, or says why not."""
        other, own = theirs["process"], self._ours["process"]
        if not own < other < len(self._addresses):
            return
        with self._changed:
            reason = _misfit(other, self._addresses[other], theirs, self._ours)
            if (
                not reason
                and other in self._found
                and not _is_closed(self._found[other])
            ):
                reason = _twice(other, self._addresses[other])
            _send(connection, {"refused": reason} if reason else self._ours)
            if not reason:
                self._found[other] = connection
                self._changed.notify()
            elif reason != self._reason:
                self._reason = reason
                sys.stderr.write(f"A caller is turned away: {reason}\n")

    def wait(self, deadline: Deadline) -> dict[int, socket.socket]:
        """Returns the connections of the processes after this one, by index.

        Raises:
            WorkerUnavailable: If one is not there by then.
        """
        expected = {*range(self._ours["process"] + 1, len(self._addresses))}

        def missing() -> set[int]:
            return expected - {i for i, c in self._found.items() if not _is_closed(c)}

        with self._changed:
            if self._changed.wait_for(lambda: not missing(), deadline.left):
                return dict(self._found)
            other = min(missing())
            reason = "it has not called"
            if self._reason:
                reason += f", and a caller was turned away: {self._reason}"
        raise _missing(other, self._addresses[other], deadline, reason)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection that is not that of a process."""
        with self._changed:
            is_kept = request in self._found.values()
        if not is_kept:
            super().shutdown_request(request)


class _Caller(socketserver.BaseRequestHandler):
    server: _Callers

    def handle(self) -> None:
        """Hears which process it is."""
        self.request.settimeout(tcp_server.REQUEST_SECONDS)
        theirs = _receive(self.request)
        if type(theirs.get("process")) is int:
            self.server.answer(theirs, self.request)


@contextlib.contextmanager
def _listening(
    addresses: Sequence[Address], ours: Mapping[str, Any]
) -> Iterator[_Callers]:
    try:
        callers = _Callers(addresses, ours)
    except OSError as error:
        port = addresses[ours["process"]].health_port
        raise ClusterError(
            f"Port {port}, the one after this process' own in TF_CONFIG, is "
            f"taken: {error.strerror}. List a port that is free, as the next one is."
        ) from error
    threading.Thread(
        target=callers.serve_forever, args=(_POLL_SECONDS,), daemon=True
    ).start()
    try:
        yield callers
    finally:
        callers.shutdown()
        callers.server_close()


def _is_closed(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    with contextlib.suppress(OSError):
        return bool(readable) and not connection.recv(1, socket.MSG_PEEK)
    return True


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
            seconds = min(deadline.left, tcp_server.REQUEST_SECONDS)
            connection = socket.create_connection(
                (address.host, address.health_port), timeout=seconds
            )
            _send(connection, ours)
            theirs = _receive(connection)
            reason = theirs.get("refused")
            if not isinstance(reason, str):
                reason = _misfit(other, address, theirs, ours)
        except (OSError, ValueError) as error:
            if connection is not None:
                connection.close()
            if deadline.is_over:
                raise _missing(other, address, deadline, str(error)) from error
            time.sleep(_POLL_SECONDS)
        else:
            if reason:
                raise ClusterError(reason)
            return connection


def _misfit(
    other: int, address: Address, theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> str:
    """Returns why what a process says does not fit, or an empty string.

    Raises:
        ValueError: If nothing that a process says.
    """
    if any(type(theirs.get(name)) is not type(value) for name, value in ours.items()):
        raise ValueError("its answer is not that of a process")
    if not accepts(theirs["token"], ours["token"]):
        return (
            f"Process {other} at {address} has another token than process "
            f"{ours['process']}. Set {TOKEN_VARIABLE} to the same in both environments."
        )
    if theirs["workers"] != ours["workers"]:
        return (
            "All processes must be told the same list of workers, in one order. "
            f"Received {ours['workers']} in process {ours['process']}, and "
            f"{theirs['workers']} in process {other} at {address}. Give TF_CONFIG the "
            'same "cluster" everywhere.'
        )
    if theirs["tensorflow"] != ours["tensorflow"]:
        return (
            f"Process {other} at {address} has TensorFlow {theirs['tensorflow']}; "
            f"process {ours['process']} has {ours['tensorflow']}. Install the same "
            "version on both."
        )
    return "" if theirs["process"] == other else _twice(theirs["process"], address)


def _twice(index: int, address: Address) -> str:
    return (
        f"Two processes are told that they are process {index} at {address}. Give each "
        'an "index" of its own in TF_CONFIG.'
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
