"""A command in the processes of a job that Ray places: `run_on_ray`.

Each actor holds one process of the command, which finds its role in `TF_CONFIG`, as
under any other engine. An actor that dies is replaced, on whatever node Ray has for it,
and the command is started again in all: TensorFlow's runtime does not go on without a
lost process, and a trainer goes on from its last checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tfgpipe.cluster.addresses import free_ports
from tfgpipe.cluster.engines.roles import TF_CONFIG, Role
from tfgpipe.cluster.errors import EX_TEMPFAIL, EXIT_PREEMPTED, ClusterError
from tfgpipe.cluster.groups import Groups

# How long processes may take to end by themselves after one is lost.
_LOSS_SECONDS = 60.0


def run_on_ray(
    command: Sequence[str],
    *,
    num_workers: int,
    num_cpus: float = 1,
    num_gpus: float = 0,
    max_restarts: int = 10,
) -> int:
    """Runs a command in several processes on a Ray cluster; returns its exit status.

    `ray.init()` comes before. The command runs in the working directory of the
    actors, and all have to see the folder that it writes to.

    Args:
        command: The program and its arguments, such as a trainer's. Each process has
            `TF_CONFIG`, with all of them and its own index.
        num_workers: Number of processes.
        num_cpus: Number of CPUs that Ray reserves for each.
        num_gpus: Number of GPUs for each.
        max_restarts: Most restarts, after an actor has died or the command has ended
            with status 42 or 75.

    Raises:
        ClusterError: If Ray is not installed.
        ValueError: If there is no process, or no command.
    """
    if num_workers < 1 or not command:
        raise ValueError(
            "Expected a command, and at least one process of it; received "
            f"{list(command)} and num_workers={num_workers}."
        )
    ray = _import_ray()
    # One thread for the command, and one that ends it.
    process = ray.remote(_Process).options(
        num_cpus=num_cpus, num_gpus=num_gpus, max_concurrency=2
    )
    actors: list[Any] = [None] * num_workers
    status = EX_TEMPFAIL
    for attempt in range(max_restarts + 1):
        try:
            actors = [process.remote() if actor is None else actor for actor in actors]
            addresses = ray.get([actor.address.remote() for actor in actors])
            statuses = _attempt(ray, actors, command, addresses)
        except ray.exceptions.RayActorError:
            # One has died before the command was started in it.
            statuses = [None] * num_workers
        status = _of_all(statuses)
        if status not in (EX_TEMPFAIL, EXIT_PREEMPTED):
            break
        lost = [i for i, each in enumerate(statuses) if each is None]
        for index in lost:
            actors[index] = None
        what = f"process {lost[0]} is lost" if lost else f"status {status}"
        if attempt < max_restarts:
            sys.stderr.write(f"[ray] {what}: start {attempt + 2} of all processes.\n")
    return status


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ClusterError(
            "Expected Ray, whose actors run the command; received an environment "
            "without. `pip install ray` brings it."
        ) from None
    return ray


def _attempt(
    ray: Any, actors: Sequence[Any], command: Sequence[str], addresses: Sequence[str]
) -> list[int | None]:
    """Returns the exit status of each process, None for one whose actor has died."""
    running = {
        actor.run.remote([*command], Role(tuple(addresses), index).tf_config): index
        for index, actor in enumerate(actors)
    }
    statuses: list[int | None] = [0] * len(actors)
    left, is_over = list(running), False
    while left:
        timeout = _LOSS_SECONDS if is_over else None
        done, left = ray.wait(left, num_returns=1, timeout=timeout)
        if not done:  # They wait for the one that is lost.
            ray.get([actors[running[each]].end.remote() for each in left])
            is_over = False
            continue
        index = running[done[0]]
        try:
            statuses[index] = ray.get(done[0])
        except ray.exceptions.RayActorError:
            statuses[index] = None
        is_over = is_over or statuses[index] != 0
    return statuses


def _of_all(statuses: Sequence[int | None]) -> int:
    """Returns the status of a command: one of its own before that of a lost process."""
    known = [EX_TEMPFAIL if each is None else each for each in statuses]
    own = [each for each in known if each not in (0, EX_TEMPFAIL, EXIT_PREEMPTED)]
    if own and None not in statuses:
        return own[0]
    return max(known)


class _Process:
    """An actor with one process of the command, which ends with it."""

    def __init__(self) -> None:
        self._groups = Groups()
        self._running: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Returns an address of this node that is free."""
        import ray

        return f"{ray.util.get_node_ip_address()}:{free_ports(1)[0]}"

    def run(self, command: Sequence[str], tf_config: str) -> int:
        """Returns the exit status of the command."""
        environment = {**os.environ, TF_CONFIG: tf_config}
        self._running = self._groups.start(
            command, env=environment, stdin=subprocess.DEVNULL
        )
        status = self._running.wait()
        self._groups.end(self._running)
        return status if status >= 0 else EX_TEMPFAIL

    def end(self) -> None:
        """Ends the command."""
        if self._running is not None:
            self._running.kill()
