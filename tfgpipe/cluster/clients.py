"""The other clients of the same workers, where each is a replica.

The graphs of all clients take part in collectives on the devices of all workers:

    client of replica 0  ───▶  worker 0 ── worker 1        the pipeline of replica 0
                         ╲ ╱      │           │            sums over replicas
    client of replica 1  ───▶  worker 2 ── worker 3        the pipeline of replica 1

Each connects to all workers, and has a session with each. Once one is gone, workers end
all these sessions, by which the other clients know. One that exits cleanly says so, and
the others go on, unless they need it.

A TensorFlow server crashes if two clients are its first at the same time, since each
replaces its manager of collectives. So they connect in the order of replicas; one that
is connected begins its session with the last worker, by which the next knows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence

from tfgpipe.cluster import peers
from tfgpipe.cluster.addresses import Address
from tfgpipe.cluster.errors import ClusterError, WorkerLost, WorkerUnavailable
from tfgpipe.cluster.health import Deadline, Session, Status, ask

_POLL_SECONDS = 0.2


class OtherClients(peers.Peers):
    """The clients of the other replicas.

    Args:
        sessions: Sessions with all workers, which tell of them.
        step_seconds: Longest wait for them in a step.
    """

    def __init__(self, sessions: Sequence[Session], *, step_seconds: float) -> None:
        super().__init__(step_seconds=step_seconds)
        self._sessions = sessions

    def close_sessions(self, *, clean: bool) -> None:
        """Ends the sessions, with a good-bye or without."""
        for session in self._sessions:
            session.close(clean=clean)

    def lost(self) -> WorkerLost | None:
        """Returns None: workers tell of lost clients, see `Cluster.exit_when_lost`."""
        return None

    def ended(self) -> WorkerLost | None:
        """Returns an error that names one that has exited cleanly, or None."""
        for replica in self._sessions[0].left:
            return WorkerLost(
                f"The client of replica {replica} has ended. This process cannot go on "
                "without it. Give all replicas as many steps, and start them again."
            )
        return None


def check_list(index: int, addresses: Sequence[Address], status: Status) -> None:
    """Raises ClusterError if a worker was started with another list."""
    listed = ",".join(map(str, addresses))
    if (status.workers, status.index) == (listed, index):
        return
    what = "without the list of all workers"
    if status.workers:
        what = f"as worker {status.index} of {status.workers}"
    raise ClusterError(
        "For several replicas each worker has to be started with the list of all, in "
        f"one order. Worker {index} at {addresses[index]} was started {what}. Start it "
        f"again with --cluster={listed} --index={index}."
    )


def wait_for_clients(
    address: Address, replicas: Iterable[int], deadline: Deadline
) -> None:
    """Waits for the clients of some replicas to have a session with a worker.

    Raises:
        WorkerUnavailable: If one has none by then.
    """
    missing = {*map(str, replicas)}
    while missing:
        with contextlib.suppress(OSError, ValueError):
            missing -= {*ask(address, seconds=deadline.left).clients}
        if missing and deadline.is_over:
            raise WorkerUnavailable(
                f"The client of replica {', '.join(sorted(missing))} is not there "
                f"after {deadline.seconds:.0f} s, as the worker at {address} says. Is "
                "it started, with the same list of workers and number of replicas?"
            )
        time.sleep(_POLL_SECONDS if missing else 0)
