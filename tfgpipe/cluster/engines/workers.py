"""The worker of a process in a job, which ends with its client, as the process does."""

from __future__ import annotations

import subprocess

from tfgpipe.cluster import worker
from tfgpipe.cluster.addresses import parse_addresses
from tfgpipe.cluster.engines.roles import Role

# Those of this process, which end when it does: that closes their standard input.
_STARTED: list[subprocess.Popen[bytes]] = []


def run_worker(role: Role, *, devices: int = 1, num_replicas: int = 1) -> int:
    """Runs the worker of this process until its client ends; returns an exit status.

    It is the client's, if that has announced it (`Cluster.announce_exit`). It is 75 if
    the client is lost, TensorFlow's server has died, or no client has come within ten
    minutes.

    Args:
        role: This process among those of the job.
        devices: Number of logical devices of the CPU.
        num_replicas: Number of clients, each the first process of its replica.
    """
    return worker.run(_options(role, devices, num_replicas))


def start_worker(role: Role, *, devices: int = 1, num_replicas: int = 1) -> None:
    """Starts the worker of this process, which is a client itself, and ends with it.

    Args:
        role: This process among those of the job.
        devices: Number of logical devices of the CPU.
        num_replicas: Number of clients.
    """
    options = _options(role, devices, num_replicas, exits_with_parent=True)
    _STARTED.append(subprocess.Popen(options.command, stdin=subprocess.PIPE))


def _options(
    role: Role, devices: int, num_replicas: int, *, exits_with_parent: bool = False
) -> worker.WorkerOptions:
    own = parse_addresses(role.workers)[role.index]
    return worker.WorkerOptions(
        port=own.port,
        host="127.0.0.1" if own.is_loopback else "0.0.0.0",
        devices=devices,
        cluster=",".join(role.workers) if num_replicas > 1 else None,
        index=role.index if num_replicas > 1 else None,
        once=True,
        exits_with_parent=exits_with_parent,
    )
