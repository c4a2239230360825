"""A Slurm of one's own: slurmctld and two slurmd on loopback, with a munged.

Debian has it all in `slurm-wlm` and `munge`.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfgpipe.cluster.addresses import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel")
NODES = ("n0", "n1")
_PATIENCE = 60.0

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def is_installed() -> bool:
    """Returns whether Slurm can be started here."""
    return all(map(shutil.which, PROGRAMS))


class Slurm:
    """A running Slurm.

    Args:
        folder: Its state and logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        configuration = str(folder / "slurm.conf")
        self.environment = {**os.environ, "SLURM_CONF": configuration}

    def call(self, *command: str, check: bool = True) -> str:
        """Returns the output of a command, such as `scontrol`."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, done
        return done.stdout

    def start(self, *command: str, log: Path) -> subprocess.Popen[bytes]:
        """Starts a command, such as `srun`, whose output goes to a file."""
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def submit(self, *arguments: str) -> str:
        """Returns the number of a job, given the arguments of `sbatch`."""
        return self.call("sbatch", "--parsable", *arguments).strip()

    def field(self, job: str, name: str) -> str:
        """Returns what `scontrol show job` says of a job under a name."""
        said = self.call("scontrol", "--oneliner", "show", "job", job)
        parts = dict(part.partition("=")[::2] for part in said.split())
        return parts[name]

    def wait(self, job: str, states: Sequence[str], seconds: float) -> str:
        """Returns the state of a job, once it is one of these."""
        deadline = time.monotonic() + seconds
        while (state := self.field(job, "JobState")) not in states:
            assert time.monotonic() < deadline, self.call("scontrol", "show", "job")
            time.sleep(0.2)
        return state


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """Starts Slurm, and ends it with all that it runs."""
    (folder / "munge").mkdir(parents=True)
    (folder / "state").mkdir()
    for each in (folder, folder / "munge"):
        each.chmod(0o755)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    text = _CONFIGURATION.format(
        folder=folder,
        host=socket.gethostname().partition(".")[0],
        user=getpass.getuser(),
        ports=free_ports(3),
    )
    (folder / "slurm.conf").write_text(text)
    slurm = Slurm(folder)
    own = {
        name: f"--{name}-file={folder}/munge/{name}" for name in ("key", "log", "pid")
    }
    commands = [
        [
            *("munged", "--foreground", "--force", "--num-threads=2", *own.values()),
            *(f"--socket={folder}/munge/socket", f"--seed-file={folder}/munge/seed"),
        ],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", node] for node in NODES),
    ]
    processes = []
    try:
        for command in commands:
            log = folder / f"{'-'.join(command[:1] + command[3:4])[:20]}.txt"
            processes.append(slurm.start(*command, log=log))
            if command[0] == "munged":
                _wait_for(lambda: (folder / "munge" / "socket").exists(), "munged")
        _wait_for(
            lambda: (
                slurm.call("sinfo", "-h", "-o%D %t", check=False).strip() == "2 idle"
            ),
            "two idle nodes",
        )
        yield slurm
    finally:
        slurm.call("scancel", f"--user={getpass.getuser()}", "--full", check=False)
        for process in reversed(processes):
            process.terminate()
            process.wait(_PATIENCE)


def _wait_for(is_there, what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not is_there():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
