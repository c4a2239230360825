"""TensorFlow's listening sockets, kept to this machine.

TensorFlow's runtime listens on all addresses of its host and can be told nothing else
(`*:port` in `ss -ltn`, whatever the address in its cluster definition). Its sockets are
this process' own, so the loopback interface is set on them once they are there: the
kernel then answers other hosts that the port is closed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator

from tfgpipe.cluster.errors import ClusterError


@contextlib.contextmanager
def serving(port: int, *, loopback: bool) -> Iterator[None]:
    """Has TensorFlow's server, which is started inside, listen as asked.

    All that starts a TensorFlow server does so inside this.

    Args:
        port: Where it listens.
        loopback: Whether this machine's own calls alone are taken. Otherwise a warning
            says that all are.

    Raises:
        ClusterError: If it cannot be kept to this machine.
    """
    if not loopback:
        warnings.warn(
            f"TensorFlow listens on port {port} of all addresses of this host, without "
            "authentication and without encryption: whoever reaches it runs what they "
            "like in this process. Keep it inside a private network.",
            stacklevel=4,
        )
    yield
    if loopback:
        _keep_to_loopback(port)


def _keep_to_loopback(port: int) -> None:
    """Has this process' sockets that listen on a port take this machine's calls only.

    Raises:
        ClusterError: If that is not possible here.
    """
    try:
        found = 0
        for listening in _listening(port):
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
            found += 1
    except (AttributeError, OSError) as error:
        raise ClusterError(_sentence(port, str(error))) from error
    if not found:
        raise ClusterError(_sentence(port, "no such socket was found"))


def _listening(port: int) -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
            with found:
                internet = found.family in (socket.AF_INET, socket.AF_INET6)
                accepts = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if internet and accepts and found.getsockname()[1] == port:
                    yield found


def _sentence(port: int, reason: str) -> str:
    return (
        f"TensorFlow listens on port {port} of all addresses of this host, and could "
        f"not be kept to this machine alone: {reason}. Run all processes in a network "
        "namespace of their own, as a container has one, or behind a firewall that "
        "closes this port, with addresses of that network in place of 127.0.0.1."
    )
