"""This process as the client of workers on other hosts.

    client  ---- tensors, graphs ---->  worker 0  stage devices /job:worker/.../task:0
       |                                   |      tensors go from worker to worker
       +-------- tensors, graphs ---->  worker 1  stage devices /job:worker/.../task:1

TensorFlow moves the tensors. What it does not do is done here: to say within a limit
which worker does not answer, since connecting to one that is down blocks; to refuse a
TensorFlow of another version; to have a worker for oneself; and to know that a worker
is gone, by the connection of its session, since TensorFlow raises whatever error it
runs into, if any.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

import tensorflow as tf

from tfgpipe.cluster import addresses as addresses_lib
from tfgpipe.cluster.addresses import Address, parse_addresses
from tfgpipe.cluster.errors import ClusterError, WorkerLost, end_process
from tfgpipe.cluster.health import Deadline, Session, wait_until_ready
from tfgpipe.cluster.server import bind_server

_POLL_SECONDS = 0.2
# How long an error may precede the news of the lost worker that caused it.
_LOSS_SECONDS = 3.0


class Cluster:
    """The workers that this process is connected to.

    Attributes:
        addresses: Their addresses.
        current: The one of this process, if it has one: TensorFlow's context, which is
            the process', is connected at most once.
    """

    current: ClassVar[Cluster | None] = None

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.addresses = tuple(session.address for session in sessions)
        self._sessions = tuple(sessions)
        self._watched = False

    def lost(self, *, seconds: float = 0.0) -> WorkerLost | None:
        """Returns an error that names a worker that is gone, or None if none is.

        Args:
            seconds: How long to wait for such news.
        """
        deadline = time.monotonic() + seconds
        while True:
            for index, session in enumerate(self._sessions):
                if session.end is not None:
                    return WorkerLost(
                        f"Worker {index} at {session.address} is gone: {session.end}. "
                        "This process cannot go on without it. Start it again, once "
                        "the worker is back, from its last checkpoint."
                    )
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def raise_if_lost(self) -> Iterator[None]:
        """Turns an error inside into `WorkerLost` if a worker is gone.

        When a worker goes, TensorFlow raises whatever it happens to run into.
        """
        try:
            yield
        except Exception as error:
            lost = self.lost(seconds=_LOSS_SECONDS)
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
    this before creating tensors, layers or datasets. Under `python -m tfgpipe.cluster
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
    addresses = parse_addresses(workers)
    if Cluster.current is not None:
        known = Cluster.current.addresses
        if known != addresses:
            raise RuntimeError(
                f"A process has one cluster. Received {','.join(map(str, addresses))} "
                f"when it was connected to {','.join(map(str, known))}. Start another "
                "process."
            )
        return Cluster.current
    sessions = _sessions(addresses, Deadline(seconds))
    own_host, _ = sessions[0].own_address
    (port,) = addresses_lib.free_ports(1)
    # The workers call back, at an address that TensorFlow by itself takes for granted
    # to be "localhost".
    cluster_spec = {
        "worker": list(map(str, addresses)),
        "localhost": [f"{own_host}:{port}"],
    }
    with bind_server(port, loopback=all(each.is_loopback for each in addresses)):
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(cluster_spec), job_name="localhost"
        )
        devices = {device.name for device in tf.config.list_logical_devices()}
    for index, (address, session) in enumerate(zip(addresses, sessions, strict=True)):
        if f"/job:worker/replica:0/task:{index}/device:CPU:0" not in devices:
            raise Cluster([session]).lost() or ClusterError(
                f"Worker {index} at {address} answers, and TensorFlow's server in it "
                "does not. Start the worker again."
            )
    cluster = Cluster(sessions)
    if os.environ.get(addresses_lib.WORKERS_VARIABLE):
        # The supervisor that has started this process starts it again.
        cluster.exit_when_lost()
    Cluster.current = cluster
    return cluster


def _sessions(addresses: Sequence[Address], deadline: Deadline) -> list[Session]:
    """Returns sessions with all workers, or with none.

    First all have to answer, so that nobody waits with a worker that others could use.
    """
    for index, address in enumerate(addresses):
        wait_until_ready(index, address, deadline)
    sessions: list[Session] = []
    with contextlib.ExitStack() as stack:
        for index, address in enumerate(addresses):
            sessions.append(_session(index, address, sessions, deadline))
            stack.callback(sessions[-1].close)
        stack.pop_all()
    return sessions


def _session(
    index: int, address: Address, others: Sequence[Session], deadline: Deadline
) -> Session:
    token = os.environ.get(addresses_lib.TOKEN_VARIABLE, "")
    while True:
        try:
            session = Session(address, token=token, seconds=deadline.left)
        except (OSError, ValueError):
            wait_until_ready(index, address, deadline)
            continue
        if session.status.granted:
            return session
        if session.status.refused:
            raise ClusterError(
                f"Worker {index} at {address} has another token than this process. "
                f"Set {addresses_lib.TOKEN_VARIABLE} to the same in both environments."
            )
        for other in others:
            if other.status.worker == session.status.worker:
                raise ClusterError(
                    f"{other.address} and {address} are one worker by two names. List "
                    "it once."
                )
        wait_until_ready(index, address, deadline)
