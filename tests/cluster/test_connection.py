"""A client and workers: what they compute together, and what they say otherwise."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.client import listed
from tests.cluster.proxies import slow_links
from tests.helpers import fresh_processes
from tests.helpers.processes import PATIENCE, environment, running, wait_for, workers
from tfgpipe import cluster
from tfgpipe.cluster import health
from tfgpipe.cluster.errors import WorkerUnavailable


def test_workers_give_what_local_devices_give_and_a_lost_one_is_named(
    tmp_path: Path,
) -> None:
    log = tmp_path / "client"
    with workers(2, tmp_path, devices=2) as two:
        cases = ("refused", "plain", "waits")
        with fresh_processes.start(
            "tests.cluster.client", listed(two), *cases, log=log
        ) as client:
            wait_for("waiting", log)
            for case in ("refused", "plain"):
                assert f"{case}: passed\n" in log.read_text()
            with pytest.raises(
                WorkerUnavailable,
                match=r"is not ready after 1 s: it works for the client at",
            ):
                health.wait_until_ready(0, two[0], health.Deadline(1))
            said = (tmp_path / f"worker-{two[0].port}.log").read_text()
            server = int(said.rpartition("process ")[2].split()[0])
            os.kill(server, signal.SIGKILL)
            assert client.wait(60) != 0
    words = f"Worker 0 at {two[0]} is gone: TensorFlow's server ended with status -9."
    assert words in log.read_text()


def test_a_list_of_workers_can_be_wrong_before_anything_is_asked() -> None:
    with pytest.raises(ValueError, match="Expected a worker's address such as"):
        cluster.connect("nowhere")


# -- all arrangements, slow links, networks apart -------------------------------------

CLIENT = (sys.executable, "-m", "tests.cluster.client")


def client(
    addresses, *cases: str, seconds: float = 2 * PATIENCE, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLIENT, listed(addresses), *cases],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def run_client(addresses, *cases: str) -> str:
    run = client(addresses, *cases)
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(f"{case}: passed" in run.stdout for case in cases)
    return run.stdout


@pytest.mark.nightly
def test_workers_give_what_local_devices_give_bit_for_bit(tmp_path: Path) -> None:
    with workers(3, tmp_path) as three:
        run_client(three, "plain")


@pytest.mark.nightly
def test_replicas_on_workers_one_client_after_another(tmp_path: Path) -> None:
    with workers(2, tmp_path, devices=2) as two:
        run_client(two, "refused", "replicas")
        # The workers are new for each client. A lost one is told by name.
        log = tmp_path / "client"
        with running([*CLIENT, listed(two), "waits"], log=log, env=environment()) as c:
            wait_for("waiting", log)
            busy = client(two, "plain", seconds=PATIENCE, TFGPIPE_SECONDS="2")
            assert "is not ready after 2 s: it works for the client at" in busy.stderr
            worker_log = tmp_path / f"worker-{two[0].port}.log"
            said = worker_log.read_text().rpartition("process ")[2]
            os.kill(int(said.split()[0]), signal.SIGKILL)
            killed = time.monotonic()
            c.wait(30)
            assert time.monotonic() - killed < 10
        said = log.read_text()
        end = "TensorFlow's server ended with status -9."
        assert f"Worker 0 at {two[0]} is gone: {end}" in said


@pytest.mark.nightly
def test_a_slow_link_changes_no_result(tmp_path: Path) -> None:
    with (
        workers(2, tmp_path) as two,
        slow_links(two, delay=0.01, bandwidth=4e6) as (addresses, links),
    ):
        run_client(addresses, "plain")
        # Tensors have gone through the links, to each worker.
        assert all(link.num_bytes > 10_000 for link in links[::2])


NETWORK = """\
set -e
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add name hub type bridge
ip link set hub up
for n in 1 2 3; do
  ip netns add host$n
  ip -n host$n link set lo up
  ip link add name to$n type veth peer name port0 netns host$n
  ip link set to$n master hub up
  ip -n host$n addr add 10.123.0.$n/24 dev port0
  ip -n host$n link set port0 up
done
"""


@pytest.mark.nightly
def test_hosts_with_networks_of_their_own(tmp_path: Path) -> None:
    """Three network namespaces: what is said of loopback addresses would show here."""
    # Processes as well, so that none outlives the shell.
    namespaces = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    isolated = ["unshare", *namespaces, "bash", "-c"]
    if not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs iproute2 and util-linux")
    python = sys.executable
    script = f"({NETWORK}) || exit 77\n" + (
        "for n in 1 2; do ip netns exec host$n "
        f"{python} -m tfgpipe.cluster worker --port=4000 --host=0.0.0.0 "
        f"> {tmp_path}/worker-$n.log 2>&1 & done\n"
        f"ip netns exec host3 {python} -m tests.cluster.client "
        "10.123.0.1:4000,10.123.0.2:4000 plain\n"
    )
    log = tmp_path / "log"
    with running([*isolated, script], log=log) as hosts:
        hosts.wait(2 * PATIENCE)
        said = log.read_text()
        # Some machines allow namespaces, and let nothing through between them.
        if hosts.returncode == 77 or "Network is unreachable" in said:
            pytest.skip(f"network namespaces do not work here: {said}")
        assert hosts.returncode == 0, said
    said = log.read_text()
    assert "plain: passed" in said
    for text in (said, (tmp_path / "worker-1.log").read_text()):
        assert "of this host, without authentication and without encryption" in text
