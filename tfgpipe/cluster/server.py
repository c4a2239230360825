"""TensorFlow's gRPC server: the interface that it listens on, and a process with one.

TensorFlow's runtime listens on all addresses of its host, which no option changes
(`*:port` in `ss -ltn`, whatever the address in its cluster definition). Its sockets are
this process' own, so `bind_server` sets the loopback interface on them once they are
there: the kernel then answers other hosts that the port is closed. The connection of
one that called in the milliseconds before is closed; a firewall or a network namespace
alone keeps it out from the first moment.

What a client leaves on a server, such as its variables, stays there for minutes after
the client is gone. So a worker starts a process for each client, which is `run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator

from tfgpipe.cluster import health
from tfgpipe.cluster.errors import ClusterError, exit_with_parent

# How often, and how long after another, late callers are looked for.
_REFUSALS, _REFUSAL_SECONDS = 50, 0.2
_CURE = (
    "Run all processes in a network namespace of their own, as a container has one, or "
    "behind a firewall that closes this port, with addresses of that network in place "
    "of 127.0.0.1."
)


@contextlib.contextmanager
def bind_server(port: int, *, loopback: bool) -> Iterator[None]:
    """Binds the TensorFlow server that is started inside.

    All that starts a TensorFlow server does so inside this.

    Args:
        port: The port that it listens on.
        loopback: True to take this machine's own calls alone. Otherwise a warning says
            that all are.

    Raises:
        ClusterError: If it cannot be bound to the loopback interface.
    """
    if not loopback:
        warnings.warn(
            f"TensorFlow listens on port {port} of all addresses of this host, without "
            "authentication and without encryption: whoever reaches it runs what they "
            "like in this process. Keep it inside a private network.",
            stacklevel=4,
        )
    yield
    if not loopback:
        return
    try:
        found = 0
        for each in _sockets(port):
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
                found += 1
        if not found:
            raise OSError("no such socket was found")
    except (AttributeError, OSError) as error:
        raise ClusterError(
            f"TensorFlow listens on port {port} of all addresses of this host, and "
            f"could not be kept to this machine alone: {error}. {_CURE}"
        ) from error
    refuse_callers(port)
    threading.Thread(target=_refuse_for_a_while, args=(port,), daemon=True).start()


def _refuse_for_a_while(port: int) -> None:
    """Refuses what waited to be accepted when the port was closed."""
    for _ in range(_REFUSALS):
        time.sleep(_REFUSAL_SECONDS)
        refuse_callers(port)


def refuse_callers(port: int) -> None:
    """Closes connections of other hosts, which called before a port was closed to them.

    Args:
        port: A port that this process listens on.
    """
    for each in _sockets(port):
        with contextlib.suppress(OSError):  # It listens, or has ended.
            caller = ipaddress.ip_address(each.getpeername()[0].partition("%")[0])
            caller = getattr(caller, "ipv4_mapped", None) or caller
            if not caller.is_loopback:
                each.shutdown(socket.SHUT_RDWR)
                sys.stderr.write(
                    f"WARNING: {caller} had connected to port {port}, and is refused: "
                    "TensorFlow listens on all addresses for some milliseconds. "
                    f"{_CURE}\n"
                )


def _sockets(port: int) -> Iterator[socket.socket]:
    """Yields this process' TCP sockets of a port."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
            with found:
                internet = found.family in (socket.AF_INET, socket.AF_INET6)
                if internet and found.getsockname()[1] == port:
                    yield found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The command line of a server process.

    Attributes:
        port: The port that it listens on.
        devices: Into how many devices the CPU is split.
        loopback: True to take this machine's own calls alone.
        cluster: The list of all servers, where several clients are to use them.
        index: The index of this one.
    """

    port: int
    devices: int
    loopback: bool
    cluster: str | None = None
    index: int = 0


def run(options: ServerOptions) -> int:
    """Serves until the parent is gone; writes a line of JSON every second."""
    exit_with_parent()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(device_count={"CPU": options.devices})
    config.gpu_options.allow_growth = True
    # A client says which other workers there are, and which of them this is. But for
    # collectives that graphs of several clients take part in, servers look each other
    # up in the list that they were started with.
    workers = [f"127.0.0.1:{options.port}"]
    if options.cluster is not None:
        workers = options.cluster.split(",")
        leader = "/job:worker/replica:0/task:0"
        config.experimental.collective_group_leader = leader
    with bind_server(options.port, loopback=options.loopback):
        tf.distribute.Server(
            {"worker": workers},
            job_name="worker",
            task_index=options.index,
            protocol="grpc",
            config=config,
        )
    gpus = len(tf.config.list_physical_devices("GPU"))
    devices = {"CPU": options.devices, **({"GPU": gpus} if gpus else {})}
    while True:
        sys.stdout.write(json.dumps({"devices": devices}) + "\n")
        sys.stdout.flush()
        time.sleep(health.BEAT_SECONDS)
