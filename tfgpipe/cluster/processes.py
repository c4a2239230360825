"""The rendezvous of processes that are replicas, and their sessions afterwards.

TensorFlow's runtime waits for processes that are not there, does not check that all
have one list of processes, and ends in whatever error it runs into when one is gone.
So before it starts, each process asks all before it for a session, on the port after
theirs; and by these sessions, which last, each knows when another is gone.

    process 2  ── POST /session ──▶  process 1  ── POST /session ──▶  process 0
       └─────────────────────────── POST /session ────────────────────▲
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfgpipe.cluster import health
from tfgpipe.cluster.addresses import (
    TOKEN_VARIABLE,
    Address,
    accepts,
    own_token,
    parse_addresses,
)
from tfgpipe.cluster.errors import ClusterError, WorkerLost, WorkerUnavailable
from tfgpipe.cluster.health import Deadline, Session, Status
from tfgpipe.cluster.peers import Peers, join
from tfgpipe.cluster.session_server import (
    REQUEST_SECONDS,
    Answer,
    SessionServer,
)

_POLL_SECONDS = 0.2


def rendezvous(workers: Sequence[str], index: int, *, seconds: float = 120.0) -> None:
    """Connects to the other processes; ends this one with status 75 when one is gone.

    If the environment variable TFGPIPE_TOKEN is set, it has to be the same in all.
    Whoever else calls meanwhile is turned away, and changes nothing.

    At its end this process tells the others that it exits cleanly, unless an error is
    not caught. See `report_exit` for one that ends by itself with another status than
    0.

    Args:
        workers: The addresses of all, this one among them.
        index: The index of this one.
        seconds: Longest wait for them.

    Raises:
        ValueError: If the list is wrong.
        WorkerUnavailable: If one is not there by then.
        ClusterError: If one has another list, or runs another TensorFlow.
    """
    processes = _Processes(parse_addresses(workers), index)
    deadline = Deadline(seconds)
    with processes.listening():
        for other in range(index):
            processes.call(other, deadline)
        processes.wait(deadline)
    join(processes)


class _Caller:
    """A session that a process after this one has asked for.

    Args:
        changed: Notified when it has begun.

    Attributes:
        end: The reason for its end, empty after a good-bye; None while it lasts.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self.end: str | None = None
        self._changed = changed
        self._connection: socket.socket | None = None
        self._is_over = False

    @property
    def is_there(self) -> bool:
        """True if nothing has closed the connection yet."""
        connection = self._connection
        if connection is None or self.end is not None:
            return self.end is None
        with contextlib.suppress(OSError, ValueError):
            readable, _, _ = select.select([connection], [], [], 0)
            return not readable or bool(connection.recv(1, socket.MSG_PEEK))
        return False

    @property
    def has_begun(self) -> bool:
        """True if the caller has its answer, which TensorFlow's start would hold up."""
        return self._connection is not None and self.is_there

    def serve(self, begin: Callable[[], socket.socket]) -> None:
        """Holds the session."""
        reason = "it has not come"
        try:
            connection = begin()
            with self._changed:
                self._connection = connection
                self._changed.notify()
            reason = health.serve_session(
                connection,
                goes_on=lambda: not self._is_over,
                max_silence=health.SILENCE_SECONDS,
            )
        finally:
            self.end = reason

    def close(self, last_words: bytes) -> None:
        """Ends the session, after last words if there are any."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                # Before `serve` ends, and the connection with it.
                self._connection.sendall(last_words)
        self._is_over = True
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)


class _Processes(Peers):
    """The processes of a list, which have sessions with each other.

    Args:
        addresses: The addresses of all.
        index: The index of this one.
    """

    def __init__(self, addresses: Sequence[Address], index: int) -> None:
        super().__init__()
        self._addresses = addresses
        self._index = index
        self._token = own_token()
        self._name = uuid.uuid4().hex
        self._asked = {
            "workers": ",".join(map(str, addresses)),
            "tensorflow": health.version("tensorflow"),
        }
        self._opened: dict[int, Session] = {}
        self._callers: dict[int, _Caller] = {}
        self._changed = threading.Condition()
        # Why the last caller was turned away, if it may have been one of the processes.
        self._reason = ""

    def close_sessions(self, *, clean: bool) -> None:
        """Ends the sessions with them, with a good-bye or without."""
        for session in self._opened.values():
            session.close(clean=clean)
        for caller in self._callers.values():
            caller.close(health.beat(left=[self._index]) if clean else b"")

    def lost(self) -> WorkerLost | None:
        """Returns an error that names one that is gone without a good-bye, or None."""
        # The end of a session is read before its good-bye, which comes first.
        ends = {i: session.end for i, session in self._opened.items()}
        ends |= {i: caller.end for i, caller in self._callers.items()}
        left = self._left
        for other, end in ends.items():
            if end is not None and other not in left:
                return self._lost(other, end)
        return None

    def ended(self) -> WorkerLost | None:
        """Returns an error that names one that has exited cleanly, or None."""
        for other in self._left:
            return self._lost(other, "it has ended")
        return None

    @property
    def _left(self) -> list[int]:
        called = [i for i, session in self._opened.items() if i in session.left]
        return called + [i for i, caller in self._callers.items() if caller.end == ""]

    def _lost(self, other: int, reason: str) -> WorkerLost:
        return WorkerLost(
            f"Process {other} at {self._addresses[other]} is gone: {reason}. This "
            f"process, {os.getpid()}, cannot go on without it. Start all again, from "
            "their last checkpoint."
        )

    # The rendezvous.

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """The processes after this one can ask for sessions, and all for its health.

        To the end of this process, unless an error is raised inside.
        """
        own = self._addresses[self._index]
        host = own.host if own.is_loopback else ""
        try:
            server = SessionServer((host, own.health_port), self)
        except OSError as error:
            raise ClusterError(
                f"Port {own.health_port}, the one after this process' own in "
                f"TF_CONFIG, is taken: {error.strerror}. List a port that is free, as "
                "the next one is."
            ) from error
        threading.Thread(
            target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True
        ).start()
        try:
            yield
        except BaseException:
            server.shutdown()
            server.server_close()
            raise

    def status(self) -> Status:
        """Returns the status of this process."""
        return Status(
            worker=self._name,
            state="ready",
            index=self._index,
            num_replicas=len(self._addresses),
            clients={str(i): "" for i, x in self._callers.items() if x.is_there},
            workers=self._asked["workers"],
            tensorflow=self._asked["tensorflow"],
        )

    def grant(self, asked: Mapping[str, Any], client: str) -> Answer:
        """Begins a session with a process, or says why not."""
        other = asked.get("replica")
        if type(other) is not int or not self._index < other < len(self._addresses):
            return Answer(400)
        if any(type(asked.get(name)) is not str for name in self._asked):
            return Answer(400)
        refused = not accepts(asked.get("token"), self._token)
        with self._changed:
            status = dataclasses.replace(self.status(), refused=refused)
            reason = self._mismatch(other, asked, refused=refused)
            if not reason and str(other) in status.clients:
                reason = self._duplicate(other)
            if reason:
                if reason != self._reason:
                    self._reason = reason
                    sys.stderr.write(f"A caller is turned away: {reason}\n")
                return Answer(403 if refused else 409, status)
            caller = self._callers[other] = _Caller(self._changed)
        granted = dataclasses.replace(status, granted=True)
        return Answer(200, granted, caller.serve)

    def call(self, other: int, deadline: Deadline) -> None:
        """Begins a session with a process that was there before, or is to come.

        Raises:
            WorkerUnavailable: If it is not there by then.
            ClusterError: If it has another list, or runs another TensorFlow.
        """
        while True:
            try:
                session = Session(
                    self._addresses[other],
                    token=self._token,
                    replica=self._index,
                    num_replicas=len(self._addresses),
                    more=self._asked,
                    seconds=min(deadline.left, REQUEST_SECONDS),
                )
            except (OSError, ValueError) as error:
                if deadline.is_over:
                    raise self._missing(other, deadline, str(error)) from error
                time.sleep(_POLL_SECONDS)
                continue
            status = session.status
            theirs = {"workers": status.workers, "tensorflow": status.tensorflow}
            reason = self._mismatch(other, theirs, refused=status.refused)
            if not reason and status.index != other:
                reason = self._duplicate(status.index)
            if not reason and not status.granted:
                reason = self._duplicate(self._index)
            if reason:
                session.close()
                raise ClusterError(reason)
            self._opened[other] = session
            return

    def wait(self, deadline: Deadline) -> None:
        """Waits for the processes after this one.

        Raises:
            WorkerUnavailable: If one is not there by then.
        """
        expected = range(self._index + 1, len(self._addresses))

        def missing() -> list[int]:
            there = {i for i, caller in self._callers.items() if caller.has_begun}
            return [i for i in expected if i not in there]

        with self._changed:
            if self._changed.wait_for(lambda: not missing(), deadline.left):
                return
            reason = "it has not called"
            if self._reason:
                reason += f", and a caller was turned away: {self._reason}"
        raise self._missing(missing()[0], deadline, reason)

    def _mismatch(self, other: int, said: Mapping[str, Any], *, refused: bool) -> str:
        """Returns the mismatch of two processes, or an empty string."""
        where, ours = f"process {other} at {self._addresses[other]}", self._asked
        if refused:
            return (
                f"P{where[1:]} has another token than process {self._index}. Set "
                f"{TOKEN_VARIABLE} to the same in both environments."
            )
        if said["workers"] != ours["workers"]:
            return (
                "All processes must be told the same list of workers, in one order. "
                f"Received {ours['workers']} in process {self._index}, and "
                f'{said["workers"]} in {where}. Give TF_CONFIG the same "cluster" '
                "everywhere."
            )
        if said["tensorflow"] != ours["tensorflow"]:
            return (
                f"P{where[1:]} has TensorFlow {said['tensorflow']}; process "
                f"{self._index} has {ours['tensorflow']}. Install the same version on "
                "both."
            )
        return ""

    def _duplicate(self, index: int) -> str:
        return (
            f"Two processes are told that they are process {index} at "
            f'{self._addresses[index]}. Give each an "index" of its own in TF_CONFIG.'
        )

    def _missing(
        self, other: int, deadline: Deadline, reason: str
    ) -> WorkerUnavailable:
        address = self._addresses[other]
        return WorkerUnavailable(
            f"Process {other} at {address} is not there after {deadline.seconds:.0f} "
            f"s: {reason}. Is it started, with the same TF_CONFIG but for its index, "
            f"and are ports {address.port} and {address.health_port} open between the "
            "hosts?"
        )
