"""Pipelines over several hosts: `python -m tfgpipe.cluster --help`.

addresses     addresses and ports of workers
health        membership: status and sessions, over HTTP
session_server  the HTTP server of whoever grants sessions
worker        lends a host's devices to one client at a time
server        TensorFlow's gRPC server, and the interface that it listens on
connection    this process as the client of workers
clients       the other clients of the same workers, where each is a replica
peers         the other processes that this one needs, and how each ends
processes     those of TF_CONFIG, where each is a replica
supervisor    workers and a command, restarted when one of them dies
errors        exceptions, exit codes, a process that ends with its parent

Neither a worker nor the supervisor needs TensorFlow in its own process.
"""

from tfgpipe.cluster.addresses import (
    REPLICA_VARIABLE,
    WORKERS_VARIABLE,
    parse_addresses,
)
from tfgpipe.cluster.connection import Cluster, connect
from tfgpipe.cluster.errors import (
    EX_TEMPFAIL,
    EXIT_PREEMPTED,
    ClusterError,
    WorkerLost,
    WorkerUnavailable,
    end_process,
)
from tfgpipe.cluster.health import SILENCE_SECONDS
from tfgpipe.cluster.peers import collective_step, report_exit
from tfgpipe.cluster.processes import rendezvous
from tfgpipe.cluster.server import bind_server

__all__ = [
    "EXIT_PREEMPTED",
    "EX_TEMPFAIL",
    "REPLICA_VARIABLE",
    "SILENCE_SECONDS",
    "WORKERS_VARIABLE",
    "Cluster",
    "ClusterError",
    "WorkerLost",
    "WorkerUnavailable",
    "bind_server",
    "collective_step",
    "connect",
    "end_process",
    "parse_addresses",
    "rendezvous",
    "report_exit",
]
