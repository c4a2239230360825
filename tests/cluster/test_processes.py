"""Replicas that are processes of their own, against one process."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from tests.cluster.processes import CLUSTER, PATIENCE, other_addresses, running
from tfgpipe import processes
from tfgpipe.cluster.addresses import free_ports
from tfgpipe.cluster.errors import TRY_AGAIN


def found(log: Path) -> dict:
    said = log.read_text()
    assert "found {" in said, said
    return json.loads(said.partition("found ")[2].partition("\n")[0])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "synchronized"])
def test_two_processes_train_as_one(how: str, tmp_path: Path) -> None:
    """Also if they synchronize, and one of them traces more often."""
    workers = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    program = (sys.executable, "-m", "tests.cluster.replica")
    logs = [tmp_path / name for name in ("0", "1", "one")]
    with contextlib.ExitStack() as stack:
        rest = ("3", how)
        cases = ((workers, "0", *rest), (workers, "1", *rest), ("", "0", *rest))
        runs = [
            stack.enter_context(running([*program, *case], log=log))
            for case, log in zip(cases, logs, strict=True)
        ]
        for run in runs:
            run.wait(2 * PATIENCE)
    first, second, one = map(found, logs)
    for name in ("loss", "mae", "evaluated", "weights"):
        assert first[name] == second[name]
        assert first[name] == pytest.approx(one[name], rel=1e-5)
    for index, process in enumerate((first, second)):
        weights, slots = process["devices"]
        expected = [
            f"/job:worker/replica:0/task:{index}/device:CPU:{i}" for i in (1, 2, 0)
        ]
        assert list(dict.fromkeys(weights)) == expected
        assert list(dict.fromkeys(slots)) == expected


@pytest.mark.slow
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
        assert first.wait(PATIENCE) == TRY_AGAIN
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


@pytest.mark.slow
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


def test_keys_of_sums_come_of_what_is_the_same_in_all_processes() -> None:
    keys = processes.InstanceKeys()
    first, second = keras.optimizers.SGD(), keras.optimizers.SGD()
    weights = [keras.Variable([float(i)]) for i in range(3)]
    assert keys.of(first, weights) == keys.of(first, weights)  # Traced twice.
    found = [*keys.of(first, weights), *keys.of(second, weights)]
    assert len(set(found)) == 6
    # A frozen weight shifts no other.
    assert keys.of(first, weights[1:]) == found[1:3]

    def group(task: int, *shape: int) -> int:
        device = f"/job:worker/replica:0/task:{task}/device:CPU:1"
        return processes.stage_group(device, 4, [tf.TensorSpec(shape, tf.float32)])

    assert group(0, 2, 3) == group(1, 2, 3) != group(0, 2, 4)
