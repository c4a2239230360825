"""Pipelines over several hosts: `python -m tfgpipe.cluster --help`.

addresses     addresses and ports of workers
health        a worker's status and sessions, over HTTP
worker        lends a host's devices to one client at a time
server        TensorFlow's gRPC server, and the interface that it listens on
connection    this process as the client of workers
clients       the other clients of the same workers, where each is a replica
peers         the other processes, where each is a replica
supervisor    workers and a command, restarted when one of them dies
errors        exceptions, exit codes, a process that ends with its parent

Neither a worker nor the supervisor needs TensorFlow in its own process, so names are
loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe.cluster.addresses import REPLICA_VARIABLE as REPLICA_VARIABLE
    from tfgpipe.cluster.addresses import WORKERS_VARIABLE as WORKERS_VARIABLE
    from tfgpipe.cluster.addresses import parse_addresses as parse_addresses
    from tfgpipe.cluster.connection import Cluster as Cluster
    from tfgpipe.cluster.connection import connect as connect
    from tfgpipe.cluster.errors import EX_TEMPFAIL as EX_TEMPFAIL
    from tfgpipe.cluster.errors import EXIT_PREEMPTED as EXIT_PREEMPTED
    from tfgpipe.cluster.errors import ClusterError as ClusterError
    from tfgpipe.cluster.errors import WorkerLost as WorkerLost
    from tfgpipe.cluster.errors import WorkerUnavailable as WorkerUnavailable
    from tfgpipe.cluster.errors import end_process as end_process
    from tfgpipe.cluster.health import SILENCE_SECONDS as SILENCE_SECONDS
    from tfgpipe.cluster.peers import needs_others as needs_others
    from tfgpipe.cluster.peers import rendezvous as rendezvous
    from tfgpipe.cluster.peers import report_exit as report_exit
    from tfgpipe.cluster.server import bind_server as bind_server

__all__, __getattr__, __dir__ = lazy_exports(__name__)
