"""A client and workers: what they compute together, and what they say otherwise."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.client import listed
from tests.cluster.processes import wait_for, workers
from tests.helpers import fresh_processes
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
