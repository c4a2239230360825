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
groups        processes that do not outlive this one
supervisor    workers and a command of one machine, restarted together
engines       what starts the processes of a job: the role of each, its worker
errors        exceptions, exit codes, a process that ends with its parent

Neither a worker nor the supervisor needs TensorFlow in its own process.
"""

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
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

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    addresses="REPLICA_VARIABLE WORKERS_VARIABLE parse_addresses",
    connection="Cluster connect",
    errors="EX_TEMPFAIL EXIT_PREEMPTED ClusterError WorkerLost WorkerUnavailable "
    "end_process",
    health="SILENCE_SECONDS",
    peers="collective_step report_exit",
    processes="rendezvous",
    server="bind_server",
)
