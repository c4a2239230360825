"""Processes that are replicas meet, and end together."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import other_addresses, running
from tfgpipe.cluster import addresses, health, processes, server
from tfgpipe.cluster.addresses import free_ports
from tfgpipe.cluster.errors import EX_TEMPFAIL, ClusterError, WorkerUnavailable

PROGRAM = """
import sys, time
from tfgpipe.cluster import health, peers, processes
health.SILENCE_SECONDS = 3.0
workers, index, how = sys.argv[1:]
processes.rendezvous(workers.split(","), int(index))
print("met", flush=True)
time.sleep(1)  # Until all have said so.
if how == "waits":
    time.sleep(60)
if how == "fails":
    raise ValueError("an error of its own")
if how == "exits with 2":
    with peers.report_exit():
        sys.exit(2)
if how == "exits with 2 untold":
    sys.exit(2)
if how == "needs another":
    time.sleep(2)
    raise type("Lost", (Exception,), {"__module__": "tensorflow.errors"})
if how == "exits with 0":
    sys.exit()
if how == "leaves":
    peers.Peers.current.close(clean=True)
    sys.exit(3)
if how == "leaves in trouble":
    peers.Peers.current.close(clean=False)
    time.sleep(60)
"""


def listed(number: int) -> str:
    return ",".join(f"127.0.0.1:{port}" for port in free_ports(number))


@contextlib.contextmanager
def running_processes(tmp_path: Path, *hows: str) -> Iterator[list]:
    """Runs processes that meet, and waits until they have."""
    workers = listed(len(hows))
    with contextlib.ExitStack() as stack:
        found = []
        for index, how in enumerate(hows):
            log = tmp_path / str(index)
            command = (sys.executable, "-c", PROGRAM, workers, str(index), how)
            found.append((stack.enter_context(running(command, log=log)), log))
        deadline = time.monotonic() + 60
        while any("met" not in log.read_text() for _, log in found):
            assert time.monotonic() < deadline, [log.read_text() for _, log in found]
            time.sleep(0.1)
        yield found


def test_processes_that_end_well_leave_the_others_alone(tmp_path: Path) -> None:
    hows = {"ends": 0, "exits with 0": 0, "leaves": 3}
    with running_processes(tmp_path, *hows, "waits") as found:
        *ending, (waits, _) = found
        assert [process.wait(20) for process, _ in ending] == [*hows.values()]
        time.sleep(1)
        assert waits.poll() is None


@pytest.mark.parametrize(
    ("how", "status"), [("fails", 1), ("exits with 2", 2), ("leaves in trouble", None)]
)
def test_when_one_fails_the_others_end_at_once(
    tmp_path: Path, how: str, status: int | None
) -> None:
    with running_processes(tmp_path, how, "waits", "waits") as found:
        (failing, _), *others = found
        assert [process.wait(20) for process, _ in others] == [EX_TEMPFAIL] * 2
        if status is not None:
            assert failing.wait(10) == status
        for _, said in others:
            assert " is gone: it " in said.read_text()


def test_who_needs_one_that_has_ended_ends_with_status_75(tmp_path: Path) -> None:
    with running_processes(tmp_path, "exits with 2 untold", "needs another") as found:
        (ending, _), (other, log) = found
        assert ending.wait(20) == 2
        assert other.wait(20) == EX_TEMPFAIL
        assert "is gone: it has ended. This process" in log.read_text()


# It is the first that others have asked for a session, the last that has asked them.
@pytest.mark.parametrize("which", [0, 2])
def test_when_one_hangs_the_others_end(tmp_path: Path, which: int) -> None:
    with running_processes(tmp_path, "waits", "waits", "waits") as found:
        (hanging, _), *others = found[which], *found[:which], *found[which + 1 :]
        time.sleep(4)  # Longer than the silence that counts: all are alive.
        assert [process.poll() for process, _ in found] == [None] * 3
        hanging.send_signal(signal.SIGSTOP)
        assert [process.wait(20) for process, _ in others] == [EX_TEMPFAIL] * 2
        # The one may end for what the other has found out.
        said = "".join(log.read_text() for _, log in others)
        assert "is gone: it has been silent for 3 s. This process" in said
        hanging.send_signal(signal.SIGCONT)
        assert hanging.wait(10) == EX_TEMPFAIL


def test_a_process_does_not_go_on_before_the_others_have_its_answer() -> None:
    """TensorFlow's start, which is next, would let no thread give it."""
    members = addresses.parse_addresses(listed(2))
    first = processes._Processes(members, 0)
    asked = {**processes._Processes(members, 1)._asked, "token": "", "replica": 1}
    answer = first.grant(asked, "127.0.0.1:9")
    assert answer.code == 200
    with pytest.raises(WorkerUnavailable, match="it has not called"):
        first.wait(health.Deadline(0.1))
    ours, theirs = socket.socketpair()
    assert answer.serve is not None
    serve, begin = answer.serve, lambda: ours
    threading.Thread(target=serve, args=(begin,), daemon=True).start()
    first.wait(health.Deadline(10))
    theirs.close()


def test_those_that_have_met_still_answer_for_their_health(tmp_path: Path) -> None:
    with running_processes(tmp_path, "waits", "waits") as found:
        (process, _), *_ = found
        workers = addresses.parse_addresses(process.args[-3])
        statuses = [health.ask(each, seconds=5) for each in workers]
    assert [status.index for status in statuses] == [0, 1]
    assert {status.state for status in statuses} == {"ready"}


def test_when_one_is_killed_the_others_end_at_once(tmp_path: Path) -> None:
    with running_processes(tmp_path, "waits", "waits", "waits") as found:
        (gone, _), *others = found
        gone.send_signal(signal.SIGKILL)
        assert [process.wait(20) for process, _ in others] == [EX_TEMPFAIL] * 2
        for _, said in others:
            # Another may have gone for the same reason before.
            assert "is gone: it closed the connection. This process" in said.read_text()


@pytest.fixture(autouse=True)
def _no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has processes that are threads of this one not end it."""
    monkeypatch.setattr(processes, "join", lambda _: None)


def meeting(*given: tuple[str, int], seconds: float = 20.0) -> list[Exception | None]:
    """Returns what each of some threads that meet as processes do has raised."""
    raised: list[Exception | None] = [None] * len(given)

    def meet(position: int, workers: str, index: int) -> None:
        try:
            processes.rendezvous(workers.split(","), index, seconds=seconds)
        except Exception as error:
            raised[position] = error

    threads = [
        threading.Thread(target=meet, args=(position, *one))
        for position, one in enumerate(given)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return raised


def test_processes_that_are_told_other_lists_are_refused() -> None:
    first, second, third = listed(3).split(",")
    told = meeting(
        (f"{first},{second}", 0), (f"{first},{second},{third}", 1), seconds=3
    )
    for error in told:
        assert isinstance(error, ClusterError)
        assert "must be told the same list of workers" in str(error)
        assert third in str(error)


def test_a_process_that_does_not_come_is_named() -> None:
    workers = listed(2)
    for index in (0, 1):
        (error,) = meeting((workers, index), seconds=1.0)
        assert isinstance(error, WorkerUnavailable)
        other = workers.split(",")[1 - index]
        words = f"Process {1 - index} at {other} is not there after 1 s"
        assert str(error).startswith(words)


def test_another_tensorflow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = itertools.chain(["2.21.0", "2.20.0"], itertools.repeat("2.19.0"))
    monkeypatch.setattr(health, "version", lambda _: next(versions))
    workers = listed(2)
    for error in meeting((workers, 0), (workers, 1), seconds=3):
        assert isinstance(error, ClusterError)
        assert "Install the same version on both" in str(error)


def test_two_processes_of_one_number_are_refused() -> None:
    workers = listed(2)
    raised = meeting((workers, 1), (workers, 1), (workers, 0), seconds=3)
    assert any(
        isinstance(error, ClusterError)
        and ("Two processes" in str(error) or "is taken" in str(error))
        for error in raised
    )


@contextlib.contextmanager
def called(workers: str, *lines: bytes) -> Iterator[list[socket.socket]]:
    """Has strangers call the first process once it is there, and say a line each."""
    port = int(workers.split(",")[0].rpartition(":")[2]) + 1
    made: list[socket.socket] = []
    deadline = time.monotonic() + 20
    while len(made) < len(lines):
        assert time.monotonic() < deadline
        with contextlib.suppress(ConnectionRefusedError):
            made.append(socket.create_connection(("127.0.0.1", port), timeout=20))
    for connection, line in zip(made, lines, strict=True):
        connection.sendall(line)
    try:
        yield made
    finally:
        for connection in made:
            connection.close()


def hello(**changed: object) -> bytes:
    """Returns a request for a session, as a process makes it."""
    said = {
        "replica": 1,
        "num_replicas": 2,
        "workers": "x",
        "tensorflow": "2.0.0",
        "token": "",
        **changed,
    }
    message = json.dumps(said).encode()
    length = f"Content-Length: {len(message)}\r\n\r\n".encode()
    head = b"POST /session HTTP/1.1\r\nContent-Type: application/json\r\n"
    return head + length + message


STRANGERS = (
    b"",  # Silent.
    b'{"process": 1',  # Never ends.
    b"GET / HTTP/1.1\r\n",
    b"[" * 4000 + b"\n",
    b"POST /session HTTP/1.1\r\n\r\n",
    hello().replace(b"Length: ", b"Length: 9"),  # Never ends.
    hello(),
    hello(replica=0),
    hello(replica=True),
    hello(replica=10**30),
    hello(replica=1, num_replicas=10**30),
    hello(workers=3),
    hello(token=5),
    hello(token="\ud800"),
)


def test_strangers_neither_hold_nor_end_processes_that_start() -> None:
    workers = listed(2)
    raised: list[Exception | None] = []

    def first() -> None:
        raised.extend(meeting((workers, 0), seconds=30))

    thread = threading.Thread(target=first)
    thread.start()
    with called(workers, *STRANGERS):
        began = time.monotonic()
        assert meeting((workers, 1), seconds=20) == [None]
        thread.join()
        assert time.monotonic() - began < 15
    assert raised == [None]


def test_a_process_is_not_taken_for_another_and_may_come_again() -> None:
    workers = listed(3)
    thread = threading.Thread(target=meeting, args=((workers, 0),))
    thread.start()
    version = health.version("tensorflow")
    true = hello(workers=workers, tensorflow=version, num_replicas=3)
    with called(workers, true, true) as both:
        answers = [connection.recv(4096) for connection in both]
        (refused,) = (i for i, line in enumerate(answers) if b" 409 " in line)
        both[1 - refused].close()  # The one that was there is gone.
        assert meeting((workers, 1), (workers, 2), seconds=5) == [None, None]
    thread.join()


def test_processes_of_another_token_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TFGPIPE_TOKEN", "of these")
    workers = listed(2)
    true = hello(workers=workers, tensorflow=health.version("tensorflow"))
    thread = threading.Thread(target=meeting, args=((workers, 0),))
    thread.start()
    with called(workers, true) as (stranger,):
        said = b"".join(iter(lambda: stranger.recv(4096), b""))
        assert b" 403 " in said
        assert b"of these" not in said
    assert "has another token than process 0" in capsys.readouterr().err
    assert meeting((workers, 1), seconds=20) == [None]
    thread.join()


def test_a_network_that_others_share_is_warned_of() -> None:
    (port,) = free_ports(1)
    with (
        pytest.warns(UserWarning, match=f"port {port} .* without authentication"),
        server.bind_server(port, loopback=False),
    ):
        pass


def test_a_server_that_cannot_be_kept_to_this_machine_is_an_error() -> None:
    (port,) = free_ports(1)
    with (
        pytest.raises(ClusterError, match=r"no such socket was found\. Run all"),
        server.bind_server(port, loopback=True),
    ):
        pass  # No server listens there.


@pytest.fixture
def other_host() -> str:
    """An address of this machine that is not the loopback one."""
    for host in other_addresses():
        return host
    pytest.skip("This machine has the loopback interface alone.")


def served(port: int, *hosts: str, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Returns a server's connections with what calls it by some addresses."""
    listening = socket.create_server(
        ("", port), family=socket.AF_INET6, dualstack_ipv6=True
    )
    stack.enter_context(listening)
    accepted = []
    for host in hosts:
        stack.enter_context(socket.create_connection((host, port)))
        accepted.append(stack.enter_context(listening.accept()[0]))
    return accepted


def test_a_host_that_calls_before_the_port_is_closed_to_it_is_refused(
    other_host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = free_ports(1)
    with contextlib.ExitStack() as stack:
        with server.bind_server(port, loopback=True):
            own, other = served(port, "127.0.0.1", other_host, stack=stack)
        assert other.recv(1) == b""
        own.setblocking(False)
        with pytest.raises(BlockingIOError):  # It is open, and nothing has come.
            own.recv(1)
    assert (
        f"WARNING: {other_host} had connected to port {port}" in capsys.readouterr().err
    )


def test_a_host_that_is_accepted_later_is_refused_as_well(
    other_host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = free_ports(1)
    with socket.create_server(("", port)) as listening:
        with server.bind_server(port, loopback=True):
            other = socket.create_connection((other_host, port))
        with other:
            accepted, _ = listening.accept()
            with accepted:
                assert accepted.recv(1) == b""
    told, ends = "", time.monotonic() + 20
    while f"WARNING: {other_host} had connected to port {port}" not in told:
        assert time.monotonic() < ends, told
        told += capsys.readouterr().err
