"""Two replicas that are processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster import replica
from tests.cluster.processes import PATIENCE, other_addresses
from tests.helpers import fresh_processes
from tfgpipe.cluster.addresses import free_ports

EPOCHS = "2"


def check_that_two_train_as_one(how: str, folder: Path) -> None:
    """Compares what two processes learn with what this one does.

    Args:
        how: One of the ways of `replica`.
        folder: Where they write.
    """
    workers = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    hosts = ("127.0.0.1", *other_addresses())
    logs = [folder / "0", folder / "1"]
    program = ("tests.cluster.replica", workers)
    with (
        fresh_processes.start(*program, "0", EPOCHS, how, *hosts, log=logs[0]) as first,
        fresh_processes.start(
            *program, "1", EPOCHS, how, *hosts, log=logs[1]
        ) as second,
    ):
        one = replica.trained("", "0", EPOCHS, how)
        for process in (first, second):
            process.wait(2 * PATIENCE)
    both = [_found(log) for log in logs]
    for name in ("loss", "mae", "rmse", "r2", "steps", "evaluated", "weights"):
        assert both[0][name] == both[1][name]
        assert both[0][name] == pytest.approx(one[name], rel=1e-5)
    for index, process in enumerate(both):
        weights, slots = process["devices"]
        expected = [
            f"/job:worker/replica:0/task:{index}/device:CPU:{i}" for i in (1, 2, 0)
        ]
        assert list(dict.fromkeys(weights)) == expected
        assert list(dict.fromkeys(slots)) == expected
        # Each tried its own port from every address of this host.
        assert process["reached"] == ["127.0.0.1"]


def _found(log: Path) -> dict:
    said = log.read_text()
    assert "found {" in said, said
    return json.loads(said.partition("found ")[2].partition("\n")[0])
