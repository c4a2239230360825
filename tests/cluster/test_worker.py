"""Workers as processes of their own."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.processes import CLUSTER, ROOT, environment, other_addresses, running
from tests.helpers.subprocesses import interpret
from tfgpipe.cluster import addresses, connection, health, session_server, worker
from tfgpipe.cluster.__main__ import main
from tfgpipe.cluster.addresses import Address, free_ports, is_taken
from tfgpipe.cluster.errors import ClusterError
from tfgpipe.cluster.worker import WorkerOptions


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_that_is_taken_is_named(
    offset: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port + offset)):
        assert main(["cluster", "worker", f"--port={port}"]) == 2
    said = capsys.readouterr().err
    assert f"Port {port + offset} of this host is taken." in said


def test_neither_worker_nor_supervisor_loads_tensorflow() -> None:
    code = (
        "import sys, tfgpipe.cluster.__main__\n"
        "sys.exit(str({'tensorflow', 'keras'} & set(sys.modules)))"
    )
    run = interpret(code)
    assert run.stderr == "set()\n"


def test_a_worker_of_another_tensorflow_is_refused_by_name(tmp_path: Path) -> None:
    other = tmp_path / "tensorflow-2.0.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Name: tensorflow\nVersion: 2.0.0\n")
    address = Address("127.0.0.1", free_ports(1)[0])
    command = [*CLUSTER, "worker", f"--port={address.port}"]
    env = environment(PYTHONPATH=str(tmp_path))
    message = f"Worker 1 at {address} has TensorFlow 2.0.0; this process has "
    with (
        running(command, log=tmp_path / "log", env=env),
        pytest.raises(ClusterError, match=re.escape(message)),
    ):
        health.wait_until_ready(1, address, health.Deadline(60))


def test_a_worker_is_for_one_client_after_another_of_this_host(tmp_path: Path) -> None:
    address = Address("127.0.0.1", free_ports(1)[0])
    command = [*CLUSTER, "worker", f"--port={address.port}", "--devices=2"]
    with running(command, log=tmp_path / "log", cwd=ROOT) as process:
        first = health.wait_until_ready(0, address, health.Deadline(180))
        assert (first.devices, first.starts) == ({"CPU": 2}, 1)
        # Every socket of its listens to this machine alone.
        for host in other_addresses():
            for port in (address.port, address.health_port):
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((host, port), timeout=5)
        ours = health.Session(address, seconds=5)
        assert ours.status.granted
        theirs = health.Session(address, seconds=5).status
        assert (theirs.granted, theirs.state) == (False, "taken")
        assert theirs.clients == {"0": "{}:{}".format(*ours.own_address)}
        time.sleep(2 * health.BEAT_SECONDS)
        assert ours.end is None
        ours.close()
        second = health.wait_until_ready(0, address, health.Deadline(180))
        assert (second.starts, second.failures) == (2, 0)
        assert second.worker == first.worker
        process.terminate()
        assert process.wait(20) == 0
    assert not is_taken(address.port)
    assert (
        "is gone: starting TensorFlow's server anew" in (tmp_path / "log").read_text()
    )


@pytest.mark.parametrize(("sent", "status"), [(0, 0), (42, 42), (None, 75)])
def test_a_worker_of_a_job_ends_as_its_client_does(
    sent: int | None, status: int, tmp_path: Path
) -> None:
    address = Address("127.0.0.1", free_ports(1)[0])
    command = [*CLUSTER, "worker", f"--port={address.port}", "--once"]
    with running(command, log=tmp_path / "log") as process:
        health.wait_until_ready(0, address, health.Deadline(60))
        session = health.Session(address, seconds=10)
        assert session.status.granted
        # As engines send it to all processes of a job; the client is to end first.
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert process.poll() is None
        if sent is not None:
            session.send_status(sent)
        session.close()
        assert process.wait(20) == status


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch):
    """A worker's port for health, of a worker that starts no TensorFlow."""
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, "of this cluster")
    port = free_ports(1)[0]
    others = ",".join(f"127.0.0.1:{p}" for p in range(2000, 2010, 2))
    listed = f"127.0.0.1:{port},{others}"
    made = worker._Worker(WorkerOptions(port=port, cluster=listed, index=0))
    made._server = types.SimpleNamespace(
        devices={"CPU": 1}, clients={}, present=set(), num_replicas=0, last_words=""
    )
    threading.Thread(target=made._health.serve_forever, daemon=True).start()
    yield Address("127.0.0.1", port)
    made._health.shutdown()
    made._health.server_close()


@pytest.mark.parametrize("token", ["", "of another", "of this cluster\n"])
def test_a_session_takes_the_token_of_the_cluster(
    token: str, listening: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, token)
    words = "Worker 0 at .* has another token than this process. Set TFGPIPE_TOKEN"
    with pytest.raises(ClusterError, match=words):
        connection._sessions([listening], health.Deadline(5))
    assert health.ask(listening, seconds=5).state == "ready"  # Nobody has it.
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, "of this cluster")
    (session,) = connection._sessions([listening], health.Deadline(5))
    assert health.ask(listening, seconds=5).state == "taken"
    session.close()


def test_clients_that_are_replicas_have_a_worker_together(listening: Address) -> None:
    def session(replica: int, num_replicas: int = 2) -> health.Session:
        return health.Session(
            listening,
            token="of this cluster",
            replica=replica,
            num_replicas=num_replicas,
            seconds=5,
        )

    first = session(0)
    assert (first.status.granted, first.status.state) == (True, "ready")
    assert not session(0).status.granted  # Another is this replica.
    assert not session(1, 3).status.granted  # Of another number.
    second = session(1)
    assert (second.status.granted, second.status.state) == (True, "taken")
    status = health.ask(listening, seconds=5)
    assert (set(status.clients), status.num_replicas) == ({"0", "1"}, 2)
    # One that ends well leaves it to the other, and none takes its place.
    second.close(clean=True)
    second.close()
    _wait(lambda: first.left)
    assert (first.left, first.end) == ([1], None)
    assert not session(1).status.granted


def test_when_a_client_is_gone_the_others_are_told_of_it(listening: Address) -> None:
    both = [
        health.Session(
            listening,
            token="of this cluster",
            replica=replica,
            num_replicas=2,
            seconds=5,
        )
        for replica in range(2)
    ]
    own = "{}:{}".format(*both[1].own_address)
    both[1].close()
    _wait(lambda: both[0].end)
    assert both[0].end == f"the client of replica 1 at {own} is gone"


def _wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_on_a_network_without_a_token_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker._Worker, "run", lambda self: 0)
    command = ["cluster", "worker", "--host=0.0.0.0"]
    assert main([*command, f"--port={free_ports(1)[0]}"]) == 0
    assert "WARNING: Whoever reaches this worker can take it" in capsys.readouterr().err
    monkeypatch.setenv(addresses.TOKEN_VARIABLE, "of this cluster")
    assert main([*command, f"--port={free_ports(1)[0]}"]) == 0
    assert capsys.readouterr().err == ""


def answer(listening: Address, request: bytes) -> bytes:
    """Returns what a worker sends until it closes the connection."""
    address = (listening.host, listening.health_port)
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def asking(**changed: object) -> bytes:
    """Returns a request for a session."""
    message = json.dumps({"token": "of this cluster", **changed}).encode()
    return (
        b"POST /session HTTP/1.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: 4000\r\n\r\n" + message + b" " * (4000 - len(message))
    )


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"POST /healthz HTTP/1.1\r\n\r\n", 404),
        # As a form of a web page, which a browser sends wherever it points.
        (b"POST /session HTTP/1.1\r\nContent-Type: text/plain\r\n\r\n", 415),
        (
            b"POST /session HTTP/1.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 45\r\n\r\n"
            b'{"token": "of this cluster", "replica": "a" }',
            400,
        ),
        (asking(token="\ud800"), 403),
        (asking(replica=5, num_replicas=10**20), 400),
        (asking(replica=-1, num_replicas=1), 400),
        (asking(replica=0, num_replicas=0), 400),
        (asking(replica=True, num_replicas=2), 400),
        (asking().replace(b"Length: ", b"Length: -"), 403),
        (asking().replace(b"Length: ", b"Length: x"), 403),
        (asking(deep="DEEP").replace(b'"DEEP"', b"[" * 3000), 403),
    ],
)
def test_other_requests_have_their_http_status(
    request_: bytes, code: int, listening: Address
) -> None:
    said = answer(listening, request_)
    assert said.startswith(f"HTTP/1.0 {code} ".encode())
    assert health.ask(listening, seconds=5).state == "ready"


@pytest.mark.parametrize("request_", [b"GET /healthz", b"GET /" + b"x" * 20_000])
def test_who_asks_for_too_long_is_left(
    request_: bytes, listening: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_server, "REQUEST_SECONDS", 0.5)
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        assert b" 200 " not in answer(listening, request_)
    assert time.monotonic() - began < 4


def test_idle_connections_take_no_more_than_some_threads(listening: Address) -> None:
    before = threading.active_count()
    address = (listening.host, listening.health_port)
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(address, timeout=5))
            for _ in range(session_server.MAX_CONNECTIONS + 5)
        ]
        assert idle[0].recv(1) == b""  # Has made way.
        assert threading.active_count() <= before + session_server.MAX_CONNECTIONS
        for _ in range(3):
            began = time.monotonic()
            assert health.ask(listening, seconds=5).state == "ready"
            assert time.monotonic() - began < 4
