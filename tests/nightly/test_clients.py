"""Several clients of one cluster, whose servers sum gradients by collectives."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import clients
from tests.cluster.processes import PATIENCE, environment
from tfgpipe.cluster.addresses import free_ports


def test_clients_train_as_one_if_servers_know_each_other(tmp_path: Path) -> None:
    number = clients.NUM_REPLICAS * clients.NUM_STAGES
    ports = ",".join(map(str, free_ports(number)))
    roles = [("server", index) for index in range(number)]
    roles += [("client", index) for index in range(clients.NUM_REPLICAS)]
    with contextlib.ExitStack() as stack:
        started = {}
        for role, index in roles:
            program = (sys.executable, "-m", clients.__name__, role, ports, str(index))
            log = stack.enter_context((tmp_path / f"{role}{index}").open("wb"))
            started[role, index] = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(),
            )
            stack.callback(started[role, index].kill)
        deadline = time.monotonic() + PATIENCE
        one = clients.trained([], None)
        found = []
        for index in range(clients.NUM_REPLICAS):
            log_file = tmp_path / f"client{index}"
            while "found {" not in (said := log_file.read_text()):
                assert time.monotonic() < deadline, said
                assert started["client", index].poll() is None, said
                time.sleep(0.2)
            found.append(json.loads(said.partition("found ")[2].partition("\n")[0]))
    first, second = found
    assert first["weights"] == second["weights"]
    assert first["weights"] == pytest.approx(one["weights"], rel=1e-4)
    means = [(a + b) / 2 for a, b in zip(first["loss"], second["loss"], strict=True)]
    assert means == pytest.approx(one["loss"], rel=1e-5)
    assert first["devices"] == [
        f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in (0, 2)
    ]
