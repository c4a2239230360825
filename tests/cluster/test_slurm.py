"""Roles of the processes of a Slurm job step, by the variables of `srun`."""

from __future__ import annotations

import re
import subprocess

import pytest

from tfgpipe.cluster.engines import slurm
from tfgpipe.cluster.engines.roles import Role

pytestmark = pytest.mark.pure

# As `srun -N2 -n4` gives them to its third process.
THIRD = {
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}


def role(address_of=str, **changes: str) -> Role:
    return slurm.slurm_role({**THIRD, **changes}, address_of)


def test_processes_of_a_host_have_ports_of_their_own() -> None:
    first, second, third, fourth = role().workers
    port = int(first.partition(":")[2])
    assert (first, second) == (f"n0:{port}", f"n0:{port + 2}")
    assert (third, fourth) == (f"n1:{port}", f"n1:{port + 2}")
    assert role().index == 2


def test_nodes_that_are_one_host_share_its_ports() -> None:
    workers = role(lambda _: "127.0.0.1").workers
    assert len({*workers}) == 4


def test_all_processes_of_a_step_have_one_list() -> None:
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    found = [
        role(SLURM_PROCID=str(i), SLURM_NODEID=str(n), SLURM_LOCALID=str(k))
        for i, (n, k) in enumerate(places)
    ]
    assert len({each.workers for each in found}) == 1
    assert [each.index for each in found] == [0, 1, 2, 3]


def test_jobs_and_steps_of_one_host_do_not_share_ports() -> None:
    steps = [(job, step) for job in range(1000, 1200) for step in (0, 1)]
    found = [
        role(lambda _: "a", SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)).workers
        for job, step in steps
    ]
    near = [w for (job, step), w in zip(steps, found, strict=True) if job < 1100]
    assert len({address for workers in near for address in workers}) == 4 * len(near)


def test_reserved_ports_are_used_if_they_are_enough() -> None:
    found = role(SLURM_STEP_RESV_PORTS="12000-12003").workers
    assert found == ("n0:12000", "n0:12002", "n1:12000", "n1:12002")
    found = role(SLURM_STEP_RESV_PORTS="12000-12001,12005-12006").workers
    assert found[:2] == ("n0:12000", "n0:12005")
    # One for each process, as Slurm reserves them unasked.
    assert role(SLURM_STEP_RESV_PORTS="12000-12001") == role()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_PROCID": "x"}, "a process that Slurm has started"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, "numbers of processes in '2(y2)'"),
        ({"SLURM_STEP_NODELIST": ""}, "names of nodes in ''"),
        ({"SLURM_NODEID": "0"}, "`srun --distribution=block`"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2,17", "SLURM_STEP_NODELIST": "n[0-1]"},
            "at most 16 processes on a host, unless ports are reserved; received 17. "
            "Reserve them: `srun --resv-ports=34`.",
        ),
    ],
)
def test_what_is_no_step_is_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        role(**changes)


def test_a_process_of_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`srun -N2 -n2 COMMAND`.*SLURM_STEP_NODEL"):
        slurm.slurm_role({})


def test_a_list_of_nodes_is_expanded_as_scontrol_does() -> None:
    """The names are those that `scontrol show hostnames` of Slurm 22.05 prints."""
    assert slurm.expand("n[08-10,12],gpu-a,r[1-2]n[3-4]") == [
        *("n08", "n09", "n10", "n12", "gpu-a"),
        *("r1n3", "r1n4", "r2n3", "r2n4"),
    ]


def test_a_name_that_cannot_be_looked_up_is_asked_of_slurm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "NodeName=n0 Arch=x86_64\n   NodeAddr=10.0.0.5 NodeHostName=vm\n"
    done = subprocess.CompletedProcess([], 0, said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert slurm.node_address("no-such-node.invalid") == "10.0.0.5"
    assert slurm.node_address("localhost") == "localhost"


def test_without_slurm_a_name_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert slurm.node_address("no-such-node.invalid") == "no-such-node.invalid"
