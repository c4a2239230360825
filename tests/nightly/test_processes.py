"""Replicas that are processes of their own: without synchronizing, when one dies."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import pair
from tests.cluster.processes import CLUSTER, PATIENCE, other_addresses, running
from tfgpipe.cluster.addresses import free_ports
from tfgpipe.cluster.errors import EX_TEMPFAIL


@pytest.mark.parametrize("how", ["", "synchronized"])
def test_two_processes_train_as_one(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "EPOCHS", "3")
    pair.check_that_two_train_as_one(how, tmp_path)


def test_a_process_that_dies_ends_the_others(tmp_path: Path) -> None:
    workers = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    program = (sys.executable, "-m", "tests.cluster.replica", workers)
    logs = [tmp_path / name for name in "01"]
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(running([*program, index, "1000000"], log=log))
            for index, log in zip("01", logs, strict=True)
        )
        deadline = time.monotonic() + PATIENCE
        while "trained" not in logs[0].read_text():
            assert time.monotonic() < deadline, logs[0].read_text()
            time.sleep(0.2)
        second.kill()
        began = time.monotonic()
        assert first.wait(PATIENCE) == EX_TEMPFAIL
        assert time.monotonic() - began < 10
    assert "Process 1 at 127.0.0.1:" in logs[0].read_text()
    assert "cannot go on without it. Start all again" in logs[0].read_text()


# Tries its own port from every address of this host.
LISTENS = """
import json, os, socket, sys
import tensorflow as tf
import tfgpipe

config = json.loads(os.environ["TF_CONFIG"])
strategy = tfgpipe.MultiWorkerPipelineStrategy(num_stages=1)
port = int(config["cluster"]["worker"][config["task"]["index"]].partition(":")[2])
for host in sys.argv[1:]:
    try:
        socket.create_connection((host, port), timeout=5).close()
        print("reached", host, flush=True)
    except ConnectionRefusedError:
        print("refused", host, flush=True)
"""


@pytest.mark.parametrize("number", [1, 2])
def test_replicas_on_loopback_addresses_are_not_reached_from_others(
    number: int, tmp_path: Path
) -> None:
    others = other_addresses()
    if not others:
        pytest.skip("needs an address beside the loopback one")
    log = tmp_path / "log"
    command = [*CLUSTER, "launch", f"--replicas={number}", "--", sys.executable, "-c"]
    with running([*command, LISTENS, "127.0.0.1", *others], log=log) as launch:
        assert launch.wait(PATIENCE) == 0, log.read_text()
    said = log.read_text()
    assert said.count("reached 127.0.0.1") == number
    for host in others:
        assert said.count(f"refused {host}") == number
