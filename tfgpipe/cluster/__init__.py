"""Pipelines over several hosts: `python -m tfgpipe.cluster --help`.

addresses   where workers are
health      how a worker tells how it is
waiting     for workers, with a limit
lifeline    a process that ends with the one that started it
listening   TensorFlow's listening sockets, kept to this machine
server      TensorFlow's server for one client
worker      lends a host's devices to one client at a time
connection  this process as the client of workers
peers       the other processes, where each is a replica
supervisor  workers and a command, started again when one of them dies
flags       the command line

Neither a worker nor the supervisor needs TensorFlow in its own process, so names are
loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfgpipe.cluster.addresses import VARIABLE
from tfgpipe.cluster.errors import (
    SAVED,
    TRY_AGAIN,
    ClusterError,
    WorkerLost,
    WorkerUnavailable,
    end_process,
)

if TYPE_CHECKING:
    from tfgpipe.cluster.connection import Cluster, connect

__all__ = [
    "SAVED",
    "TRY_AGAIN",
    "VARIABLE",
    "Cluster",
    "ClusterError",
    "WorkerLost",
    "WorkerUnavailable",
    "connect",
    "end_process",
]


def __getattr__(name: str) -> Any:
    if name not in ("Cluster", "connect"):
        raise AttributeError(f"module 'tfgpipe.cluster' has no attribute {name!r}")
    return getattr(importlib.import_module("tfgpipe.cluster.connection"), name)
