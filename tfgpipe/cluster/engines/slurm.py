"""The processes of a Slurm job step, by the variables that `srun` gives each of them.

    SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE    n[0-1,5]  and  2(x2),1
    SLURM_PROCID, SLURM_NODEID, SLURM_LOCALID         this process, and its place
    SLURM_JOB_ID, SLURM_STEP_ID                       of which the ports follow
    SLURM_STEP_RESV_PORTS                             or these, if they are enough

(`man srun`, "OUTPUT ENVIRONMENT VARIABLES".) Nodes are called by their names; where a
name cannot be looked up, by the address that `scontrol show node` has. Each process has
a port for tensors and the next one for health. TensorFlow's own
`SlurmClusterResolver` has one port for all jobs of a host, and needs GPUs.
"""

from __future__ import annotations

import collections
import itertools
import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping

from tfgpipe.cluster.engines.roles import Role

# Between the registered ports in common use and those that Linux gives to connections.
_FIRST_PORT, _LAST_PORT = 16_000, 32_000
# Ports of a job step on each host: of 16 processes.
_PORTS_OF_A_STEP = 32
# Of a job's steps that run at a time. A prime, so that few jobs meet.
_STEP_STRIDE = 131


def slurm_role(
    environment: Mapping[str, str] | None = None,
    address_of: Callable[[str], str] | None = None,
) -> Role:
    """Returns this process among those of its job step.

    Args:
        environment: Defaults to that of this process.
        address_of: Returns the address of a node by its name. Defaults to one that asks
            the resolver, then Slurm.

    Raises:
        ValueError: If this is no process of a job step, or nodes have not their
            processes one after another.
    """
    variables = os.environ if environment is None else environment
    try:
        nodes = expand(variables["SLURM_STEP_NODELIST"])
        counts = _counts(variables["SLURM_STEP_TASKS_PER_NODE"])
        index, node, local = (
            int(variables[f"SLURM_{name}"]) for name in ("PROCID", "NODEID", "LOCALID")
        )
        job, step = (int(variables[f"SLURM_{name}_ID"]) for name in ("JOB", "STEP"))
    except (KeyError, ValueError) as error:
        raise ValueError(
            "Expected a process that Slurm has started, as `srun -N2 -n2 COMMAND` "
            f"does; received an environment without {error}."
        ) from None
    places = [(n, i) for n, count in enumerate(counts) for i in range(count)]
    if places[index : index + 1] != [(node, local)] or len(nodes) != len(counts):
        raise ValueError(
            "Expected the processes of a node to be numbered one after another, as by "
            f"`srun --distribution=block`; received process {index} as number {local} "
            f"of node {node}, of {', '.join(map(str, counts))} processes on "
            f"{', '.join(nodes)}."
        )
    hosts = [(address_of or node_address)(name) for name in nodes]
    most = max(collections.Counter(hosts[n] for n, _ in places).values())
    ports = _reserved(variables.get("SLURM_STEP_RESV_PORTS", ""))
    if len(ports) < most:  # Slurm may reserve one for each process unasked.
        ports = _derived(job, step)
    if len(ports) < most:
        raise ValueError(
            f"Expected at most {len(ports)} processes on a host, unless ports are "
            f"reserved; received {most}. Reserve them: `srun --resv-ports={2 * most}`."
        )
    counts_of: collections.Counter[str] = collections.Counter()
    listed = []
    for n, _ in places:
        listed.append(f"{hosts[n]}:{ports[counts_of[hosts[n]]]}")
        counts_of[hosts[n]] += 1
    return Role(tuple(listed), index)


def expand(listed: str) -> list[str]:
    """Returns the names in a list of nodes.

    >>> expand("n[08-10,12],gpu-a,r[1-2]n[3-4]")
    ['n08', 'n09', 'n10', 'n12', 'gpu-a', 'r1n3', 'r1n4', 'r2n3', 'r2n4']

    Raises:
        ValueError: If it is no such list.
    """
    names = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed):
        parts = re.split(r"\[([^\]]*)\]", item)
        choices = [_numbers(x) if i % 2 else [x] for i, x in enumerate(parts)]
        names += ["".join(each) for each in itertools.product(*choices)]
    if not names:
        raise ValueError(f"names of nodes in {listed!r}")
    return names


def node_address(name: str) -> str:
    """Returns the name of a node if it can be looked up, else Slurm's address of it."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        try:
            said = subprocess.run(
                ["scontrol", "show", "node", name],
                capture_output=True,
                text=True,
                check=False,
            ).stdout
        except OSError:
            return name
        found = re.search(r"NodeAddr=(\S+)", said)
        return found[1] if found else name
    return name


def _numbers(text: str) -> list[str]:
    """Returns the numbers of `08-10,12`, in their width."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        found += [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    return found


def _counts(text: str) -> list[int]:
    """Returns the numbers of processes, one for each node, of `2(x2),1`."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ValueError(f"numbers of processes in {text!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _reserved(text: str) -> list[int]:
    """Returns ports after which the next one is reserved, too."""
    ports = sorted(map(int, _numbers(text))) if text else []
    found: list[int] = []
    for port in ports:
        if port + 1 in ports and port - 1 not in found:
            found.append(port)
    return found


def _derived(job: int, step: int) -> list[int]:
    """Returns ports for the processes of a host, others for each of 500 job steps."""
    number = (_LAST_PORT - _FIRST_PORT) // _PORTS_OF_A_STEP
    first = _FIRST_PORT + (job + step * _STEP_STRIDE) % number * _PORTS_OF_A_STEP
    return list(range(first, first + _PORTS_OF_A_STEP, 2))
