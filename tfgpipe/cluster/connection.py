"""This process as the client of workers on other hosts.

    client  ---- tensors, graphs ---->  worker 0  stage devices /job:worker/.../task:0
       |                                   |      tensors go from worker to worker
       +-------- tensors, graphs ---->  worker 1  stage devices /job:worker/.../task:1

TensorFlow moves the tensors. What it does not do is done here: to say within a limit
which worker does not answer, since connecting to one that is down blocks; to refuse a
TensorFlow of another version; to have a worker for oneself; and to know that a worker
is gone, by the connection of its session, since TensorFlow tells it by whatever error
it runs into, if at all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfgpipe.cluster import addresses as addresses_lib
from tfgpipe.cluster import health, listening
from tfgpipe.cluster.addresses import Address
from tfgpipe.cluster.errors import ClusterError, WorkerLost, end_process
from tfgpipe.cluster.waiting import Limit, wait_until_ready

_POLL_SECONDS = 0.2
# How long after an error it may still turn out that it came from a lost worker.
_DOUBT_SECONDS = 3.0


class Cluster:
    """The workers that this process is connected to.

    Attributes:
        addresses: Where they are.
    """

    def __init__(self, sessions: Sequence[_Session]) -> None:
        self.addresses = tuple(session.address for session in sessions)
        self._sessions = tuple(sessions)
        self._watched = False

    def lost(self, *, seconds: float = 0.0) -> WorkerLost | None:
        """Returns the error that tells which worker is gone, or None if none is.

        Args:
            seconds: How long to wait for such news.
        """
        deadline = time.monotonic() + seconds
        while True:
            for number, session in enumerate(self._sessions):
                if session.end is not None:
                    return WorkerLost(
                        f"Worker {number} at {session.address} is gone: {session.end}. "
                        "This process cannot go on without it. Start it again, once "
                        "the worker is back, from its last checkpoint."
                    )
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Turns an error inside into `WorkerLost` if a worker is gone.

        When a worker goes, TensorFlow raises whatever it happens to run into.
        """
        try:
            yield
        except Exception as error:
            lost = self.lost(seconds=_DOUBT_SECONDS)
            if lost is None:
                raise
            raise lost from error

    def exit_when_lost(self, *, seconds: float = 5.0) -> None:
        """Ends this process with status 75 once a worker has been gone for `seconds`.

        That is the last resort for when TensorFlow waits for it instead of failing.
        """
        if self._watched:
            return
        self._watched = True

        def watch() -> None:
            while (lost := self.lost()) is None:
                time.sleep(_POLL_SECONDS)
            time.sleep(seconds)
            end_process(lost)

        threading.Thread(target=watch, daemon=True, name="lost workers").start()


def connect(workers: str | Sequence[str], *, seconds: float = 120.0) -> Cluster:
    """Connects this process to workers, whose devices pipelines then run on.

    TensorFlow has one cluster a process: what is connected stays so to the end. Call
    this before tensors, layers or datasets are made. Under `python -m tfgpipe.cluster
    launch` the process also ends, as by `Cluster.exit_when_lost`.

    Args:
        workers: Where they are, such as `"10.0.0.5:4000,10.0.0.6:4000"`.
        seconds: How long to wait for all of them to be ready.

    Raises:
        ValueError: If the list is wrong.
        WorkerUnavailable: If one is not ready by then.
        ClusterError: If one runs another TensorFlow, or two names mean the same one.
        RuntimeError: If this process is connected to other workers.
    """
    addresses = addresses_lib.parse(workers)
    if _connected:
        (cluster,) = _connected
        if cluster.addresses != addresses:
            raise RuntimeError(
                "A process has one cluster. Received "
                f"{_listed(addresses)} when it was connected to "
                f"{_listed(cluster.addresses)}. Start another process."
            )
        return cluster
    sessions = _sessions(addresses, Limit(seconds))
    host = sessions[0].own_host
    (port,) = addresses_lib.free_ports(1)
    # The workers call back, at an address that TensorFlow by itself takes for granted
    # to be "localhost".
    cluster_spec = {
        "worker": list(map(str, addresses)),
        "localhost": [f"{host}:{port}"],
    }
    loopback = all(address.is_loopback for address in addresses)
    with listening.serving(port, loopback=loopback):
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(cluster_spec), job_name="localhost"
        )
        devices = {device.name for device in tf.config.list_logical_devices()}
    for number, (address, session) in enumerate(zip(addresses, sessions, strict=True)):
        if f"/job:worker/replica:0/task:{number}/device:CPU:0" not in devices:
            raise session.error() or ClusterError(
                f"Worker {number} at {address} answers, and TensorFlow's server in it "
                "does not. Start the worker again."
            )
    cluster = Cluster(sessions)
    if os.environ.get(addresses_lib.VARIABLE):
        # Whoever has started us starts us again.
        cluster.exit_when_lost()
    _connected.append(cluster)
    return cluster


# TensorFlow's context, which is this process', is connected at most once.
_connected: list[Cluster] = []


class _Session:
    """A worker that is ours as long as the connection is open.

    Attributes:
        address: The worker's.
        name: The worker's own.
        own_host: This host's address, as the worker sees it.
        end: What ended it, or None.
    """

    def __init__(self, address: Address, name: str, connection: socket.socket) -> None:
        self.address = address
        self.name = name
        self.own_host: str = connection.getsockname()[0]
        self.end: str | None = None
        self._connection = connection
        threading.Thread(target=self._listen, daemon=True).start()

    def error(self) -> WorkerLost | None:
        """Returns the error that tells that the worker is gone, if it is."""
        return Cluster([self]).lost()

    def close(self) -> None:
        """Gives the worker back."""
        # Which wakes the thread as well, as closing alone would not.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        self._connection.settimeout(health.SILENCE_SECONDS)
        try:
            while self._connection.recv(1024):
                pass
            self.end = "it closed the connection"
        except TimeoutError:
            self.end = f"it has been silent for {health.SILENCE_SECONDS:.0f} s"
        except OSError as error:
            self.end = error.strerror or str(error)
        self._connection.close()


def _sessions(addresses: Sequence[Address], limit: Limit) -> list[_Session]:
    """Returns sessions with all workers, or with none.

    First all have to answer, so that nobody waits with a worker that others could use.
    """
    for number, address in enumerate(addresses):
        wait_until_ready(number, address, limit)
    sessions: list[_Session] = []
    try:
        for number, address in enumerate(addresses):
            sessions.append(_session(number, address, sessions, limit))
    except BaseException:
        for session in sessions:
            session.close()
        raise
    return sessions


def _session(
    number: int,
    address: Address,
    others: Sequence[_Session],
    limit: Limit,
) -> _Session:
    while True:
        try:
            connection, status = health.request(
                address,
                {"ask": "session", "token": os.environ.get(addresses_lib.TOKEN, "")},
                seconds=limit.left,
            )
        except (OSError, ValueError):
            wait_until_ready(number, address, limit)
            continue
        if status.granted:
            return _Session(address, status.worker, connection)
        connection.close()
        if status.refused:
            raise ClusterError(
                f"Worker {number} at {address} has another token than this process. "
                f"Set {addresses_lib.TOKEN} to the same in both environments."
            )
        for other in others:
            if other.name == status.worker:
                raise ClusterError(
                    f"{other.address} and {address} are one worker by two names. List "
                    "it once."
                )
        wait_until_ready(number, address, limit)


def _listed(addresses: Sequence[Address]) -> str:
    return ",".join(map(str, addresses))
