"""The other processes of a run in which each process is a replica.

TensorFlow's runtime waits for processes that are not there, takes whatever list of
processes each is told for granted, and ends in whatever error it runs into when one is
gone. So before it starts, each process tells all before it who it is and what it was
told, on the port after its own; and by these connections, which stay open, each knows
within a second when another is gone, and by their heartbeats when one hangs.

    process 2  ── hello ──▶  process 1  ── hello ──▶  process 0
       └────────────────────── hello ────────────────────▲

A process that ends well says so, and the others go on. One that ends in any other way,
by an error or with another status than 0, leaves sums that the others would wait for
without end, so they end as well.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tfgpipe.cluster import addresses as addresses_lib
from tfgpipe.cluster import health
from tfgpipe.cluster.addresses import Address
from tfgpipe.cluster.errors import (
    ClusterError,
    WorkerLost,
    WorkerUnavailable,
    end_process,
)
from tfgpipe.cluster.waiting import Limit

_POLL_SECONDS = 0.2
# A machine that is down is noticed after half a minute.
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 4,
}
# So that a process that ends well is not taken for one that is gone.
_GOODBYE = {"ends": "well"}
# How long after an error it may still turn out that it came from a lost process.
_DOUBT_SECONDS = 3.0


def meet(workers: Sequence[str], index: int, *, seconds: float = 120.0) -> None:
    """Meets the other processes, and ends this one with status 75 when one is gone.

    Args:
        workers: Where all are, this one among them.
        index: Which of them this one is.
        seconds: How long to wait for them.

    Raises:
        ValueError: If the list is wrong.
        WorkerUnavailable: If one is not there by then.
        ClusterError: If one was told another list, or runs another TensorFlow.
    """
    addresses = addresses_lib.parse(workers)
    limit, ours = Limit(seconds), _hello(addresses, index)
    connections: dict[int, socket.socket] = {}
    own = addresses[index]
    with _server(own) as server:
        for number in range(index):
            connections[number] = _call(number, addresses[number], ours, limit)
        while len(connections) < len(addresses) - 1:
            number, connection = _answer(server, addresses, connections, ours, limit)
            connections[number] = connection
    others = _Others(connections, addresses)
    _met.append(others)
    exits = _Exits()
    sys.exit = exits
    atexit.register(exits.leave, others)


def leave(*, well: bool) -> None:
    """Tells the other processes, if there are any, that this one is about to end.

    At its end a process does so by itself, as far as Python knows how it ends; not if
    it ends by `os._exit`.

    Args:
        well: Whether they can go on. Otherwise they end with status 75.
    """
    for others in _met:
        others.leave(well=well)


def doubt(error: BaseException) -> None:
    """Waits for seconds, in which this process ends if another is gone.

    Args:
        error: Nothing is waited for unless it is TensorFlow's, which raises whatever it
            runs into when another process is gone.
    """
    if _met and type(error).__module__.startswith("tensorflow."):
        time.sleep(_DOUBT_SECONDS)


class _Others:
    """The other processes, once all have met."""

    def __init__(
        self, connections: Mapping[int, socket.socket], addresses: Sequence[Address]
    ) -> None:
        self._connections = tuple(connections.values())
        self._has_left = False
        for number, connection in connections.items():
            arguments = (number, addresses[number], connection)
            threading.Thread(target=self._watch, args=arguments, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def leave(self, *, well: bool) -> None:
        """Says good-bye if this process ends well, and else breaks off."""
        if self._has_left:
            return
        self._has_left = True
        for connection in self._connections:
            with contextlib.suppress(OSError):
                if well:
                    health.send(connection, _GOODBYE)
                connection.shutdown(socket.SHUT_WR if well else socket.SHUT_RDWR)

    def _beat(self) -> None:
        """Gives signs of life, by which the others know that this process runs."""
        while not self._has_left:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # It is gone, as `_watch` notes.
                    health.beat(connection)
            time.sleep(health.BEAT_SECONDS)

    def _watch(self, number: int, address: Address, connection: socket.socket) -> None:
        """Ends this process when another is gone without a good-bye."""
        connection.settimeout(health.SILENCE_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
        try:
            if health.receive(connection, after_beats=True) == _GOODBYE:
                return
            reason = "it says what it should not"
        except TimeoutError:
            reason = f"it has been silent for {health.SILENCE_SECONDS:.0f} s"
        except ConnectionError:
            reason = "it closed the connection"  # Or the kernel did, in its place.
        except (OSError, ValueError) as error:
            reason = str(error)
        if self._has_left:
            return  # This process is about to end by itself.
        end_process(
            WorkerLost(
                f"Process {number} at {address} is gone: {reason}. This process, "
                f"{os.getpid()}, cannot go on without it. Start all again, from their "
                "last checkpoint."
            )
        )


class _Exits:
    """`sys.exit`, which remembers its status: Python tells it to nobody at the end.

    Attributes:
        status: What it was called with last, by the main thread.
    """

    def __init__(self) -> None:
        self.status: object = None
        self._exit = sys.exit

    def __call__(self, status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            self.status = status
        self._exit(status)

    def leave(self, others: _Others) -> None:
        """Leaves the other processes, at the end of this one."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            doubt(error)
        others.leave(well=error is None and self.status in (None, 0))


# The processes of a run meet once.
_met: list[_Others] = []


def _hello(addresses: Sequence[Address], index: int) -> dict[str, Any]:
    return {
        "process": index,
        "workers": ",".join(map(str, addresses)),
        "tensorflow": health.version("tensorflow"),
    }


def _server(own: Address) -> socket.socket:
    host = own.host if own.is_loopback else ""
    try:
        return socket.create_server((host, own.health_port))
    except OSError as error:
        raise ClusterError(
            f"Port {own.health_port}, the one after this process' own in TF_CONFIG, is "
            f"taken: {error.strerror}. List a port that is free, as the next one is."
        ) from error


def _call(
    number: int, address: Address, ours: Mapping[str, Any], limit: Limit
) -> socket.socket:
    """Returns a connection to a process that was there before, or is to come."""
    while True:
        try:
            connection = socket.create_connection(
                (address.host, address.health_port), timeout=limit.left
            )
        except OSError as error:
            if limit.is_over:
                raise _missing(number, address, limit, str(error)) from error
            time.sleep(_POLL_SECONDS)
            continue
        try:
            health.send(connection, ours)
            _check(number, address, health.receive(connection), ours)
        except (OSError, ValueError) as error:
            connection.close()
            if limit.is_over:
                raise _missing(number, address, limit, str(error)) from error
            time.sleep(_POLL_SECONDS)
            continue
        return connection


def _answer(
    server: socket.socket,
    addresses: Sequence[Address],
    known: Mapping[int, socket.socket],
    ours: Mapping[str, Any],
    limit: Limit,
) -> tuple[int, socket.socket]:
    """Returns the number of a process that calls, and the connection to it."""
    while True:
        server.settimeout(limit.left)
        try:
            connection, _ = server.accept()
        except TimeoutError as error:
            number = next(
                n
                for n in range(len(addresses))
                if n != ours["process"] and n not in known
            )
            reason = "it has not called"
            raise _missing(number, addresses[number], limit, reason) from error
        connection.settimeout(limit.left)
        try:
            theirs = health.receive(connection)
            health.send(connection, ours)
        except (OSError, ValueError):
            connection.close()  # Whoever it was, it is none of us.
            continue
        said = theirs.get("process")
        number = said if isinstance(said, int) and 0 <= said < len(addresses) else 0
        _check(number, addresses[number], theirs, ours)
        return number, connection


def _check(
    number: int,
    where: Address,
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
) -> None:
    """Raises ClusterError if what a process says does not fit."""
    if theirs.get("workers") != ours["workers"]:
        raise ClusterError(
            "All processes must be told the same list of workers, in one order. "
            f"Received {ours['workers']} here, and {theirs.get('workers')} in process "
            f'{number} at {where}. Give TF_CONFIG the same "cluster" everywhere.'
        )
    if theirs.get("tensorflow") != ours["tensorflow"]:
        raise ClusterError(
            f"Process {number} at {where} has TensorFlow {theirs.get('tensorflow')}; "
            f"this process has {ours['tensorflow']}. Install the same version on both."
        )
    if theirs.get("process") == ours["process"]:
        raise ClusterError(
            f"Two processes are told that they are process {number} at {where}. Give "
            'each an "index" of its own in TF_CONFIG.'
        )


def _missing(
    number: int, address: Address, limit: Limit, reason: str
) -> WorkerUnavailable:
    return WorkerUnavailable(
        f"Process {number} at {address} is not there after {limit.seconds:.0f} s: "
        f"{reason}. Is it started, with the same TF_CONFIG but for its index, and are "
        f"ports {address.port} and {address.health_port} open between the hosts?"
    )
