"""What a worker says of itself, and what is made of nonsense."""

from __future__ import annotations

import sys
import time

import pytest

from tests.cluster.fakes import answering, http, status
from tfgpipe.cluster import health
from tfgpipe.cluster.addresses import Address, free_ports
from tfgpipe.cluster.errors import ClusterError, WorkerUnavailable
from tfgpipe.cluster.health import Deadline

pytestmark = pytest.mark.pure


def test_a_status_arrives_as_it_was_sent() -> None:
    sent = status(starts=2, devices={"CPU": 2, "GPU": 1}, clients={"0": "10.0.0.7:1"})
    with answering(sent) as address:
        assert health.ask(address, seconds=5) == sent
    assert sent.tensorflow == health.version("tensorflow")
    assert sent.python == sys.version.split()[0]
    assert health.version("no-such-thing") == "none"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"\x80\x04\x95\x0e.\n", "its answer is no HTTP"),
        (b"{}\n", "its answer is no HTTP"),
        (b"x" * 5000, "its answer is no HTTP"),
        (http(b"\x80\x04\x95\x0e.\n"), "its answer is no line of JSON"),
        (http(b"[]\n"), "its answer is no line of JSON"),
        (http(b"x" * 5000), "its answer is no line of JSON"),
        (http(b"{}\n"), "its answer is no status of a worker"),
        (status(state="odd"), "its answer is no status of a worker"),
        (status(starts="1"), "its answer is no status of a worker"),
        (status(devices={"CPU": "many"}), "its answer is no status of a worker"),
        (status(clients={"0": 1}), "its answer is no status of a worker"),
        (b"", "it closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it closed the connection"),
        (http(b'{"worker":'), "it closed the connection"),
    ],
)
def test_nonsense_is_no_status(answer: bytes, message: str) -> None:
    with answering(answer) as address:
        with pytest.raises((ValueError, ConnectionError), match=message):
            health.ask(address, seconds=5)
        with pytest.raises(WorkerUnavailable, match=message):
            health.wait_until_ready(0, address, Deadline(0.1))


def test_a_worker_that_never_comes_up_is_named_with_the_time_waited() -> None:
    address = Address("127.0.0.1", free_ports(1)[0])
    before = time.monotonic()
    with pytest.raises(WorkerUnavailable) as raised:
        health.wait_until_ready(3, address, Deadline(1))
    assert 0.9 < time.monotonic() - before < 15
    assert str(raised.value) == (
        f"Worker 3 at {address} is not ready after 1 s: Connection refused. Is it "
        f"started there, by `python -m tfgpipe.cluster worker --port={address.port}`, "
        f"and are ports {address.port} and {address.port + 1} open between the hosts?"
    )


@pytest.mark.parametrize(
    ("state", "num_replicas", "message"),
    [
        ("starting", 0, "TensorFlow is starting in it"),
        ("taken", 1, "it works for the client at 10.0.0.7:1. Is it"),
        ("taken", 2, "it works for the client of replica 0 at 10.0.0.7:1. Is it"),
    ],
)
def test_a_worker_that_is_not_ready_says_why(
    state: str, num_replicas: int, message: str
) -> None:
    clients = {"0": "10.0.0.7:1"}
    told = status(state=state, clients=clients, num_replicas=num_replicas)
    with (
        answering(told) as address,
        pytest.raises(WorkerUnavailable, match=message),
    ):
        health.wait_until_ready(0, address, Deadline(0.1))


@pytest.mark.parametrize("state", ["starting", "ready"])
def test_another_tensorflow_is_refused_by_the_workers_name(state: str) -> None:
    with answering(status(tensorflow="2.20.0", state=state)) as address:
        message = (
            f"Worker 1 at {address} has TensorFlow 2.20.0; this process has "
            f"{health.version('tensorflow')}. "
        )
        with pytest.raises(ClusterError, match=message.replace(".", r"\.")):
            health.wait_until_ready(1, address, Deadline(5))
