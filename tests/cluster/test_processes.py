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

from tests.cluster import replica
from tests.helpers import fresh_processes
from tests.helpers.marks import nightly
from tests.helpers.processes import CLUSTER, PATIENCE, other_addresses, running
from tfgpipe.cluster.addresses import free_ports
from tfgpipe.cluster.errors import EX_TEMPFAIL
from tfgpipe.distribution import process_group


@pytest.mark.parametrize(
    ("how", "epochs"),
    [("synchronized", 2), *nightly([("", 3), ("synchronized", 3)])],
)
def test_two_processes_train_as_one_and_are_reached_on_loopback_alone(
    how: str, epochs: int, tmp_path: Path
) -> None:
    """Also if they synchronize, and one of them traces more often."""
    workers = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    hosts = ("127.0.0.1", *other_addresses())
    logs = [tmp_path / "0", tmp_path / "1"]
    program = ("tests.cluster.replica", workers)
    more = (str(epochs), how)
    with (
        fresh_processes.start(*program, "0", *more, *hosts, log=logs[0]) as first,
        fresh_processes.start(*program, "1", *more, *hosts, log=logs[1]) as second,
    ):
        one = replica.trained("", "0", *more)
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


def test_keys_of_sums_come_of_what_is_the_same_in_all_processes() -> None:
    keys = process_group.InstanceKeys()
    first, second = keras.optimizers.SGD(), keras.optimizers.SGD()
    weights = [keras.Variable([float(i)]) for i in range(3)]
    assert keys.for_weights(first, weights) == keys.for_weights(
        first, weights
    )  # Traced twice.
    found = [*keys.for_weights(first, weights), *keys.for_weights(second, weights)]
    assert len(set(found)) == 6
    # A frozen weight shifts no other.
    assert keys.for_weights(first, weights[1:]) == found[1:3]

    def group(process: int, stage: int, *shape: int) -> int:
        """Of processes that have a device on each of two tasks."""
        tasks = range(2 * process, 2 * process + 2)
        device = f"/job:worker/replica:0/task:{tasks[stage]}/device:CPU:1"
        processes = process_group.ProcessGroup(
            size=2, index=process, tasks=tasks, device=device
        )
        specs = [tf.TensorSpec(shape, tf.float32)]
        return processes.stage_group_key(process, device, 4, specs)

    assert group(0, 0, 2, 3) == group(1, 0, 2, 3)
    assert len({group(0, 0, 2, 3), group(0, 0, 2, 4), group(0, 1, 2, 3)}) == 3


@pytest.mark.nightly
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


@pytest.mark.nightly
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
