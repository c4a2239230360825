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
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from tfgpipe.cluster import addresses as addresses_lib
from tfgpipe.cluster import clients, peers
from tfgpipe.cluster.addresses import Address, parse_addresses
from tfgpipe.cluster.errors import (
    ClusterError,
    WorkerLost,
    WorkerUnavailable,
    end_process,
)
from tfgpipe.cluster.health import (
    Deadline,
    Session,
    describe_clients,
    wait_until_ready,
)
from tfgpipe.cluster.server import bind_server

_POLL_SECONDS = 0.2
# How long an error may precede the news of the lost worker that caused it.
_LOSS_SECONDS = 3.0


class Cluster:
    """The workers that this process is connected to.

    Attributes:
        addresses: Their addresses.
        replica: The index of the replica whose client this process is.
        num_replicas: The number of clients.
        workers: The positions of the replica's own workers.
        current: The one of this process, if it has one: TensorFlow's context, which is
            the process', is connected at most once.
    """

    current: ClassVar[Cluster | None] = None

    def __init__(
        self, sessions: Sequence[Session], *, replica: int = 0, num_replicas: int = 1
    ) -> None:
        self.addresses = tuple(session.address for session in sessions)
        self.replica = replica
        self.num_replicas = num_replicas
        self.workers = addresses_lib.replica_workers(
            len(sessions), replica, num_replicas
        )
        self._sessions = tuple(sessions)
        self._watched = False

    def lost(self, *, seconds: float = 0.0) -> WorkerLost | None:
        """Returns an error that names a worker that is gone, or None if none is."""
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

    def announce_exit(self, status: int) -> None:
        """Tells workers that end with this process the status that it exits with.

        Otherwise they end with 75, as those of a process that is lost.
        """
        for session in self._sessions:
            session.send_status(status)

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

        That is the last resort for when TensorFlow waits for it instead of failing. An
        error that nothing catches is printed, and ends it with 75 as well if a worker
        is gone; of clients that are replicas one of TensorFlow does, since their own
        errors end the others.
        """
        if self._watched:
            return
        self._watched = True
        show = sys.excepthook

        def exit_if_lost(*error: Any) -> None:
            show(*error)
            if not issubclass(error[0], Exception):
                return
            # Of replicas the first error of one ends the sessions of all.
            of_one = self.num_replicas == 1
            if of_one or error[0] is WorkerLost or _is_of_tensorflow(error[0]):
                lost = self.lost(seconds=_LOSS_SECONDS if of_one else 0)
                if lost is not None:
                    end_process(lost)

        sys.excepthook = exit_if_lost

        def watch() -> None:
            while (lost := self.lost()) is None:
                time.sleep(_POLL_SECONDS)
            time.sleep(seconds)
            end_process(lost)

        threading.Thread(target=watch, daemon=True, name="lost workers").start()


def _is_of_tensorflow(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "tensorflow"


def connect(
    workers: str | Sequence[str],
    *,
    replica: int = 0,
    num_replicas: int = 1,
    seconds: float = 120.0,
    step_seconds: float = 1800.0,
) -> Cluster:
    """Connects this process to workers, whose devices pipelines then run on.

    TensorFlow has one cluster a process: what is connected stays so to the end. Call
    this before creating tensors, layers or datasets. Under `python -m tfgpipe.cluster
    launch` the process also ends, as by `Cluster.exit_when_lost`.

    Several processes can be clients together, each a replica with a pipeline over its
    part of the workers, which have to be started with the list as well (`worker
    --cluster=LIST --index=I`). A `tfgpipe.PipelineStrategy` then sums gradients over
    all replicas. Such a process ends with status 75 when a worker or another client is
    gone.

    Args:
        workers: Their addresses, such as `"10.0.0.5:4000,10.0.0.6:4000"`; all of them,
            in the same order for each client.
        replica: The index of this process, from 0. Its workers are that part of the
            list.
        num_replicas: The number of clients, which divides that of the workers.
        seconds: Time to wait until all of them are ready.
        step_seconds: Time limit of a step of all replicas, the first with its tracing.
            Then this process ends with status 75.

    Raises:
        ValueError: If the list is wrong, or not for so many replicas.
        WorkerUnavailable: If one, or another client, is not ready by then.
        ClusterError: If one runs another TensorFlow, was started with another list, or
            two names mean the same one.
        RuntimeError: If this process is connected to other workers.
    """
    addresses = parse_addresses(workers)
    addresses_lib.replica_workers(len(addresses), replica, num_replicas)
    _check_not_connected_otherwise(addresses, replica, num_replicas)
    if Cluster.current is not None:
        return Cluster.current
    deadline = Deadline(seconds)
    if num_replicas == 1:
        sessions = _sessions(addresses, deadline)
        _connect_tensorflow(addresses, sessions)
    else:
        sessions = _sessions_of_replica(addresses, deadline, replica, num_replicas)
    cluster = Cluster(sessions, replica=replica, num_replicas=num_replicas)
    if num_replicas > 1:
        peers.join(clients.OtherClients(sessions, step_seconds=step_seconds))
        # After an error of its own, but before one of TensorFlow ends it.
        cluster.exit_when_lost(seconds=_LOSS_SECONDS / 2)
        clients.wait_for_clients(addresses[-1], range(num_replicas), deadline)
    if os.environ.get(addresses_lib.WORKERS_VARIABLE):
        # The supervisor that has started this process starts it again.
        cluster.exit_when_lost()
    Cluster.current = cluster
    return cluster


def _check_not_connected_otherwise(
    addresses: Sequence[Address], replica: int, num_replicas: int
) -> None:
    """Raises an error if this process is another replica, or of another cluster."""
    index = os.environ.get(addresses_lib.REPLICA_VARIABLE)
    if index is not None and num_replicas == 1:
        raise ValueError(
            f"This process is one of several replicas: {addresses_lib.REPLICA_VARIABLE}"
            f"={index}. Received a connection of a single client. Pass "
            f"replica={index}, and num_replicas as in --replicas of the launch."
        )
    if (known := Cluster.current) is None:
        return
    asked = _describe(addresses, replica, num_replicas)
    before = _describe(known.addresses, known.replica, known.num_replicas)
    if before != asked:
        raise RuntimeError(
            f"A process has one cluster. Received {asked} when it was connected to "
            f"{before}. Start another process."
        )


def _describe(addresses: Sequence[Address], replica: int, num_replicas: int) -> str:
    listed = ",".join(map(str, addresses))
    if num_replicas == 1:
        return listed
    return f"{listed} as replica {replica} of {num_replicas}"


def _connect_tensorflow(
    addresses: Sequence[Address], sessions: Sequence[Session]
) -> None:
    """Connects TensorFlow to the workers with which there are sessions, or to more."""
    import tensorflow as tf

    own_host, _ = sessions[0].own_address
    loopback = all(each.is_loopback for each in addresses)
    with contextlib.ExitStack() as stack:
        (port,) = addresses_lib.reserve_ports(1, stack)
        stack.enter_context(bind_server(port, loopback=loopback))
        # The workers call back, at an address that TensorFlow by itself takes for
        # granted to be "localhost".
        cluster_spec = {
            "worker": list(map(str, addresses)),
            "localhost": [f"{own_host}:{port}"],
        }
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(cluster_spec), job_name="localhost"
        )
        devices = {device.name for device in tf.config.list_logical_devices()}
    for index, address in enumerate(addresses):
        if f"/job:worker/replica:0/task:{index}/device:CPU:0" not in devices:
            raise Cluster(sessions).lost() or ClusterError(
                f"Worker {index} at {address} answers, and TensorFlow's server in it "
                "does not. Start the worker again."
            )


def _sessions_of_replica(
    addresses: Sequence[Address], deadline: Deadline, replica: int, num_replicas: int
) -> list[Session]:
    """Connects as one client of several, and returns sessions with all workers."""
    for index, address in enumerate(addresses):
        clients.check_list(index, addresses, wait_until_ready(index, address, deadline))
    last = addresses[-1]
    # Until they are connected.
    clients.wait_for_clients(last, range(replica), deadline)
    sessions = _sessions(addresses[:-1], deadline, replica, num_replicas)
    with contextlib.ExitStack() as stack:
        for session in sessions:
            stack.callback(session.close)
        _connect_tensorflow(addresses, sessions)
        sessions += _sessions(
            [last], deadline, replica, num_replicas, first=len(sessions)
        )
        stack.pop_all()
    return sessions


def _sessions(
    addresses: Sequence[Address],
    deadline: Deadline,
    replica: int = 0,
    num_replicas: int = 1,
    first: int = 0,
) -> list[Session]:
    """Returns sessions with all workers, or with none.

    First all have to answer, so that nobody waits with a worker that others could use.
    """
    for index, address in enumerate(addresses, first):
        wait_until_ready(index, address, deadline)
    sessions: list[Session] = []
    with contextlib.ExitStack() as stack:
        for index, address in enumerate(addresses, first):
            sessions.append(
                _session(index, address, sessions, deadline, replica, num_replicas)
            )
            stack.callback(sessions[-1].close)
        stack.pop_all()
    return sessions


def _session(
    index: int,
    address: Address,
    others: Sequence[Session],
    deadline: Deadline,
    replica: int,
    num_replicas: int,
) -> Session:
    token = addresses_lib.own_token()
    while True:
        try:
            session = Session(
                address,
                token=token,
                replica=replica,
                num_replicas=num_replicas,
                seconds=deadline.left,
            )
        except (OSError, ValueError):
            wait_until_ready(index, address, deadline)
            continue
        status = session.status
        if status.granted:
            return session
        if status.refused:
            raise ClusterError(
                f"Worker {index} at {address} has another token than this process. "
                f"Set {addresses_lib.TOKEN_VARIABLE} to the same in both environments."
            )
        for other in others:
            if other.status.worker == status.worker:
                raise ClusterError(
                    f"{other.address} and {address} are one worker by two names. List "
                    "it once."
                )
        if status.state == "ready" and deadline.is_over:
            raise WorkerUnavailable(
                f"Worker {index} at {address} is not there for replica {replica} of "
                f"{num_replicas} after {deadline.seconds:.0f} s: it works for "
                f"{describe_clients(status)}, of {status.num_replicas}. Give all "
                "clients the same num_replicas, and each a replica of its own."
            )
        wait_until_ready(index, address, deadline)
        time.sleep(_POLL_SECONDS)
