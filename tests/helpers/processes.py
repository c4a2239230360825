"""Real processes for tests: workers, the supervisor, and what they have started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.helpers.subprocesses import ROOT
from tfgpipe.cluster import addresses, health
from tfgpipe.cluster.addresses import Address

CLUSTER = (sys.executable, "-m", "tfgpipe.cluster")
# TensorFlow's start takes its time on two busy cores.
PATIENCE = 180.0


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of processes that import this checkout."""
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [more.pop("PYTHONPATH", ""), str(ROOT), inherited]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **more,
    }


@contextlib.contextmanager
def running(
    command: Sequence[str],
    *,
    log: Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command with its output in a file, and ends it and all its children."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(env or environment()),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def workers(
    number: int,
    folder: Path,
    *,
    devices: int = 1,
    cwd: Path = ROOT,
    listed: bool = False,
) -> Iterator[list[Address]]:
    """Runs workers, and yields their addresses once all are ready.

    Args:
        number: How many.
        folder: Where they write.
        devices: Of each.
        cwd: Where they run.
        listed: Whether they have their list, for clients that are replicas.
    """
    with contextlib.ExitStack() as stack:
        made = [Address("127.0.0.1", p) for p in addresses.free_ports(number)]
        workers = ",".join(map(str, made))
        for index, address in enumerate(made):
            flags = ["worker", f"--port={address.port}", f"--devices={devices}"]
            if listed:
                flags += [f"--cluster={workers}", f"--index={index}"]
            log = folder / f"worker-{address.port}.log"
            stack.enter_context(running([*CLUSTER, *flags], log=log, cwd=cwd))
        limit = health.Deadline(PATIENCE)
        for k, address in enumerate(made):
            health.wait_until_ready(k, address, limit)
        yield made


def descendants(pid: int) -> list[int]:
    """Returns the children of a process, and theirs."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
            for child in map(int, text.split()):
                found += [child, *descendants(child)]
    return found


def arguments(pid: int) -> str:
    """Returns the command line of a process, empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def wait_for(text: str, log: Path, *, count: int = 1) -> str:
    """Returns what is in a file, once it holds a text `count` times."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        said = log.read_text(errors="replace") if log.exists() else ""
        if said.count(text) >= count:
            return said
        time.sleep(0.1)
    raise AssertionError(f"{text!r} is not in {log}:\n{said}")


def none_of(pids: Sequence[int]) -> bool:
    """Returns whether processes are all gone, within a few seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not any(arguments(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def other_addresses() -> list[str]:
    """Returns the addresses of this host that are not the loopback one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # It has none.
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


_SIOCGIFADDR = 0x8915
