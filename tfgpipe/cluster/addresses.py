"""Addresses of workers: `host:port` for tensors, the port after it for health."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import ipaddress
import itertools
import os
import socket
from collections.abc import Sequence

WORKERS_VARIABLE = "TFGPIPE_CLUSTER"
"""The environment variable with the workers of a supervised command."""

REPLICA_VARIABLE = "TFGPIPE_REPLICA"
"""The environment variable with the index of a supervised client of several."""

# The environment variable of the secret that workers and their client share, if any.
TOKEN_VARIABLE = "TFGPIPE_TOKEN"

# Unprivileged ports; a health port follows each.
_FIRST, _LAST = 1024, 65534


@dataclasses.dataclass(frozen=True)
class Address:
    """The address of a worker.

    Attributes:
        host: A name or an IPv4 address.
        port: The port of TensorFlow's gRPC server.
    """

    host: str
    port: int

    @property
    def health_port(self) -> int:
        """The port of the worker's health: the next one."""
        return self.port + 1

    @property
    def is_loopback(self) -> bool:
        """True if the host is this machine's loopback address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # A name, which we do not look up.

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_addresses(workers: str | Sequence[str]) -> tuple[Address, ...]:
    """Returns the addresses in a list of workers.

    >>> found = tfgpipe.cluster.parse_addresses("10.0.0.5:4000, 10.0.0.6:4000")
    >>> [str(address) for address in found]
    ['10.0.0.5:4000', '10.0.0.6:4000']

    Args:
        workers: Such as `"host:port,host:port"`, or these apart.

    Raises:
        ValueError: If one is no address, is there twice, or cannot be reached by the
            others.
    """
    names = workers.split(",") if isinstance(workers, str) else workers
    if not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise TypeError(
            "Workers are named by `host:port`, separated by commas or in a list. "
            f"Received {workers!r}."
        )
    addresses = tuple(_address(name.strip()) for name in names)
    if not addresses:
        raise ValueError("A cluster needs a worker. Received an empty list.")
    for other, address in itertools.combinations(addresses, 2):
        if address.host == other.host and abs(address.port - other.port) < 2:
            raise ValueError(
                "Each worker has two ports of its own, that of its address and the "
                f"next. Received {other} and {address}. Leave a port between."
            )
    loopback = [address for address in addresses if address.is_loopback]
    if loopback and len(loopback) < len(addresses):
        raise ValueError(
            "Workers send tensors to each other, so each must be listed by an address "
            f"that all others reach. Received {loopback[0]}, which other hosts take "
            "for themselves. List it by its address in your network."
        )
    return addresses


def replica_workers(num_workers: int, replica: int, num_replicas: int) -> range:
    """Returns the positions of a replica's workers in the list of all workers.

    >>> replica_workers(6, 1, 3)
    range(2, 4)

    Raises:
        ValueError: If workers are left over, or there is no such replica.
    """
    if num_replicas < 1 or num_workers % num_replicas:
        raise ValueError(
            "Each replica has as many workers, those next to each other in the list. "
            f"Received {num_workers} workers for {num_replicas} replicas. List a "
            "multiple of the replicas."
        )
    if not 0 <= replica < num_replicas:
        raise ValueError(
            f"The indices of {num_replicas} replicas are 0 to {num_replicas - 1}. "
            f"Received replica={replica}. Give each process one of its own."
        )
    each = num_workers // num_replicas
    return range(replica * each, (replica + 1) * each)


def reserve_ports(num_workers: int, stack: contextlib.ExitStack) -> list[int]:
    """Returns free ports of this host, which no other program is given.

    They are bound, without listening, until the stack is closed, as are the ports after
    them. A server that sets SO_REUSEADDR, as those of TensorFlow and Python do, can
    listen there meanwhile.
    """
    found: list[int] = []
    while len(found) < num_workers:
        port = stack.enter_context(_reserve(0)).getsockname()[1]
        if port <= _LAST:
            with contextlib.suppress(OSError):
                stack.enter_context(_reserve(port + 1))
                found.append(port)
    return found


def free_ports(num_workers: int) -> list[int]:
    """Returns ports of this host that are free, as are the ports after them."""
    with contextlib.ExitStack() as stack:
        return reserve_ports(num_workers, stack)


def is_taken(port: int) -> bool:
    """Returns whether another program listens on a port of this host."""
    try:
        # On POSIX with SO_REUSEADDR: connections that have just ended do not count.
        socket.create_server(("", port), backlog=1).close()
    except OSError:
        return True
    return False


def own_token() -> str:
    """Returns the secret that this process shares with others, or an empty string."""
    return os.environ.get(TOKEN_VARIABLE, "")


def accepts(received: object, own: str) -> bool:
    """Returns whether something received is the own secret, if there is one."""
    other = received if isinstance(received, str) else ""
    # JSON can hold halves of characters, which UTF-8 cannot.
    encoded = other.encode(errors="surrogatepass")
    return not own or hmac.compare_digest(encoded, own.encode())


def _reserve(port: int) -> socket.socket:
    reserved = socket.socket()
    try:
        reserved.bind(("", port))
    except OSError:
        reserved.close()
        raise
    # Not before: two could reserve one port.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reserved


def _address(name: str) -> Address:
    host, _, port = name.rpartition(":")
    is_port = port.isdecimal() and _FIRST <= int(port) <= _LAST
    if not is_port or host.split() != [host]:
        raise ValueError(
            f"Expected a worker's address such as 10.0.0.5:4000, of a port from "
            f"{_FIRST} to {_LAST}; received {name!r}."
        )
    return Address(host, int(port))
