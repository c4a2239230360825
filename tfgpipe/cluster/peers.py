"""The other processes of a run in which each process is a replica.

TensorFlow's runtime waits for processes that are not there, takes whatever list of
processes each is told for granted, and ends in whatever error it runs into when one is
gone. So before it starts, each process tells all before it who it is and what it was
told, on the port after its own; and by these connections, which stay open, each knows
within a second when another is gone.

    process 2  ── hello ──▶  process 1  ── hello ──▶  process 0
       └────────────────────── hello ────────────────────▲
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

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
    for number, connection in connections.items():
        arguments = (number, addresses[number], connection)
        threading.Thread(target=_watch, args=arguments, daemon=True).start()
    atexit.register(_take_leave, list(connections.values()))


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


def _watch(number: int, address: Address, connection: socket.socket) -> None:
    """Ends this process when another is gone without a good-bye."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
    try:
        if health.receive(connection) == _GOODBYE:
            return
        reason = "it says what it should not"
    except (OSError, ValueError) as error:
        reason = str(error)
    end_process(
        WorkerLost(
            f"Process {number} at {address} is gone: {reason}. This process, "
            f"{os.getpid()}, cannot go on without it. Start all again, from their last "
            "checkpoint."
        )
    )


def _take_leave(connections: Sequence[socket.socket]) -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # It ends by an error, so the others end as well.
    for connection in connections:
        try:
            health.send(connection, _GOODBYE)
        except OSError:
            continue
