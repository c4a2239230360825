"""Membership: who is there, and sessions by which each knows that another is.

Workers, their clients and replicas that are processes use it, over HTTP, on the port
after the member's own. What follows says worker and client; of two processes the one
with the lower index is the worker's side.

    GET /healthz
        -> 200, a line of JSON: {"worker": "5f0c", "state": "ready", "starts": 1, ...}
    POST /session    {"token": "...", "replica": 0, "num_replicas": 1}
        -> 200, the same line of JSON, then an empty line every second, which the
           client answers with another: the worker is the client's while the connection
           is open; {"left": [1]} instead when replica 1 has exited cleanly, and
           {"end": "..."} before it closes. A client that exits cleanly says "bye",
           and one that knows its exit status "status 42"
        -> 403 another token, 409 not ready or taken: the same line of JSON alone

Each side of a session knows within seconds when the other is gone: a process that has
ended by the closed connection, a machine or a network that is down by the silence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import importlib.metadata
import json
import math
import platform
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from tfgpipe._compat import distributions
from tfgpipe.cluster.addresses import Address
from tfgpipe.cluster.errors import ClusterError, WorkerUnavailable

State = Literal["starting", "ready", "taken"]

HEALTH_PATH, SESSION_PATH = "/healthz", "/session"
BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
"""Without a sign of life for so long a peer is gone; one that swaps is slow."""
# So that a client that exits cleanly is not taken for one that is gone.
GOODBYE = b"bye\n"
MAX_BYTES = 4096
_POLL_SECONDS = 0.2
_SERVE_SECONDS = 0.1
_CLOSED = "it closed the connection"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """The status of a worker.

    Attributes:
        worker: A name that no other worker has.
        state: Readiness for a client.
        granted: True in the answer that gives it to the asking client.
        refused: True in the answer to a client that has another token.
        starts: Number of starts of TensorFlow in it.
        failures: Number of TensorFlow's deaths in it.
        devices: The number of devices of each kind; none before it is ready.
        tensorflow: A version.
        tfgpipe: A version.
        python: A version.
        clients: The addresses of the clients that have it, by the index of the replica.
        num_replicas: Number of clients that are to have it; zero while none has.
        workers: The list of workers that it was started with, or an empty string.
        index: Its index in that list.
    """

    worker: str
    state: State
    granted: bool = False
    refused: bool = False
    starts: int = 0
    failures: int = 0
    devices: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tensorflow: str = dataclasses.field(default_factory=lambda: version("tensorflow"))
    tfgpipe: str = dataclasses.field(default_factory=lambda: version("tfgpipe"))
    python: str = dataclasses.field(default_factory=platform.python_version)
    clients: Mapping[str, str] = dataclasses.field(default_factory=dict)
    num_replicas: int = 0
    workers: str = ""
    index: int = 0

    def to_json(self) -> bytes:
        """Returns a line of JSON."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> Status:
        """Returns the status in a line of JSON.

        Raises:
            ValueError: If it holds anything else.
        """
        message = parse_message(line)
        example = dataclasses.asdict(cls(worker="", state="ready"))
        values: dict[str, Any] = {name: message.get(name) for name in example}
        if (
            any(
                type(values[name]) is not type(value) for name, value in example.items()
            )
            or values["state"] not in get_args(State)
            or any(type(count) is not int for count in values["devices"].values())
            or any(type(client) is not str for client in values["clients"].values())
        ):
            raise ValueError("its answer is no status of a worker")
        return cls(**values)


def parse_message(line: bytes) -> dict[str, Any]:
    """Returns a JSON object; raises ValueError if the line holds anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(line)
        if isinstance(message, dict):
            return message
    raise ValueError("its answer is no line of JSON")


def version(package: str) -> str:
    """Returns the version of an installed package, without importing it."""
    if package == "tensorflow":
        return next(iter(distributions.installed_tensorflows().values()), "none")
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def ask(address: Address, *, seconds: float) -> Status:
    """Returns the status of a worker.

    Raises:
        OSError: If nothing answers within `seconds`.
        ValueError: If what answers is no worker.
    """
    with contextlib.closing(_connection(address, seconds)) as connection:
        connection.request("GET", HEALTH_PATH)
        with _response(connection) as response:
            return _status(response)


class Session:
    """A request to have a worker; it has it until it ends, if granted.

    Args:
        address: The worker's.
        token: The secret that the worker shares with its clients, if it has one.
        replica: The index of the replica whose client this process is.
        num_replicas: The number of clients that are to have the worker.
        more: Further content of the request.
        seconds: The limit for an answer.

    Attributes:
        address: The worker's.
        status: The worker's answer, with `granted`.
        own_address: The host and port of this side of the connection.
        end: The reason that the session was lost, or None.
        left: The replicas whose clients have exited cleanly.

    Raises:
        OSError: If nothing answers within `seconds`.
        ValueError: If what answers is no worker.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: str = "",
        replica: int = 0,
        num_replicas: int = 1,
        more: Mapping[str, str] | None = None,
        seconds: float,
    ) -> None:
        self.address = address
        self.end: str | None = None
        self.left: list[int] = []
        self._is_over = False
        asked = {"token": token, "replica": replica, "num_replicas": num_replicas}
        asked |= more or {}
        connection = _connection(address, seconds)
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            connection.request(
                "POST",
                SESSION_PATH,
                body=json.dumps(asked),
                headers={"Content-Type": "application/json"},
            )
            # The response takes the socket over from the connection.
            self._socket: socket.socket = connection.sock
            self.own_address: tuple[str, int] = self._socket.getsockname()
            self._response = stack.enter_context(_response(connection))
            self.status = _status(self._response)
            if self.status.granted:
                stack.pop_all()
                threading.Thread(target=self._watch, daemon=True).start()

    def close(self, *, clean: bool = False) -> None:
        """Gives the worker back, with a good-bye if this process exits cleanly."""
        self._is_over = True
        with contextlib.suppress(OSError):
            if clean:
                self._socket.sendall(GOODBYE)
            else:  # Which wakes the thread as well, as closing alone would not.
                self._socket.shutdown(socket.SHUT_RDWR)

    def send_status(self, status: int) -> None:
        """Tells the worker the status that this process exits with."""
        with contextlib.suppress(OSError):
            self._socket.sendall(b"status %d\n" % status)

    def _watch(self) -> None:
        """Waits for the end, which is when no more beats come."""
        with self._response as response:
            end = _CLOSED
            try:
                self._socket.settimeout(SILENCE_SECONDS)
                while line := response.readline(MAX_BYTES):
                    if line.strip():
                        said = parse_message(line)
                        self.left += said.get("left", [])
                        end = said.get("end", end)
                    if not self._is_over:
                        self._socket.sendall(b"\n")
            except TimeoutError:
                end = f"it has been silent for {SILENCE_SECONDS:.0f} s"
            except ConnectionError:  # The kernel has closed it.
                pass
            except (OSError, ValueError) as error:
                end = getattr(error, "strerror", None) or str(error)
        if not self._is_over:
            self.end = end


def _connection(address: Address, seconds: float) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(
        address.host, address.health_port, timeout=seconds
    )


def _response(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    try:
        return connection.getresponse()
    except http.client.RemoteDisconnected:
        raise ConnectionError("it closed the connection") from None
    except http.client.HTTPException:
        raise ValueError("its answer is no HTTP") from None


def _status(response: http.client.HTTPResponse) -> Status:
    line = response.readline(MAX_BYTES)
    if len(line) < MAX_BYTES and not line.endswith(b"\n"):
        raise ConnectionError("it closed the connection")
    return Status.from_json(line)


def beat(*, left: Sequence[int] = (), end: str = "") -> bytes:
    """Returns a line that a worker sends to a client in a session.

    Args:
        left: The replicas whose clients have exited cleanly since the last one.
        end: The reason that the session ends.
    """
    said = {name: x for name, x in (("left", left), ("end", end)) if x}
    return json.dumps(said).encode() + b"\n" if said else b"\n"


def serve_session(
    connection: socket.socket,
    *,
    goes_on: Callable[[], bool],
    news: Callable[[], bytes] = beat,
    max_silence: float = math.inf,
    on_status: Callable[[int], None] = lambda _: None,
) -> str:
    """Beats in a session that this process has granted, until a side ends it.

    Args:
        connection: The connection.
        goes_on: Returns whether this side holds it.
        news: Returns the next line to send.
        max_silence: Seconds after which a silent client is gone.
        on_status: Called with the status that the client is to exit with, if it says.

    Returns:
        The reason why the client is gone; an empty string if it has said good-bye, or
        this side has ended the session.
    """
    well, heard, next_beat = False, Deadline(max_silence), Deadline(0)
    with contextlib.suppress(OSError):
        while goes_on():
            readable, _, _ = select.select([connection], [], [], _SERVE_SECONDS)
            if readable:
                said = connection.recv(1024)
                if not said:
                    break
                well = well or GOODBYE in said
                for status in re.findall(rb"status (\d{1,3})\n", said):
                    on_status(int(status))
                heard = Deadline(max_silence)
            elif heard.is_over and not well:
                return f"it has been silent for {max_silence:.0f} s"
            if next_beat.is_over:
                connection.sendall(news())
                next_beat = Deadline(BEAT_SECONDS)
        else:
            return ""
    return "" if well else _CLOSED


def describe_client(replica: int, clients: Mapping[int, str], num_replicas: int) -> str:
    """Returns a client of a worker, for messages."""
    of_replica = f" of replica {replica}" if num_replicas > 1 else ""
    return f"the client{of_replica} at {clients[replica]}"


def describe_clients(status: Status) -> str:
    """Returns the clients that have a worker, for messages."""
    clients = {int(replica): client for replica, client in status.clients.items()}
    each = (describe_client(d, clients, status.num_replicas) for d in clients)
    return ", ".join(each)


class Deadline:
    """A point in time, so many seconds from now on.

    Attributes:
        seconds: The distance at first.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least a moment."""
        return max(0.1, self._end - time.monotonic())

    @property
    def is_over(self) -> bool:
        """True if nothing is left."""
        return time.monotonic() >= self._end


def wait_until_ready(index: int, address: Address, deadline: Deadline) -> Status:
    """Returns the status of a worker, once it is ready.

    Args:
        index: Its index among the workers, for messages.
        address: Its address.
        deadline: The limit.

    Raises:
        WorkerUnavailable: If it is not ready by then.
        ClusterError: If it runs another TensorFlow than this process.
    """
    while True:
        try:
            status = ask(address, seconds=min(deadline.left, 5.0))
        except ValueError as error:
            reason = str(error)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            ours = version("tensorflow")
            if status.tensorflow != ours:
                raise ClusterError(
                    f"Worker {index} at {address} has TensorFlow {status.tensorflow}; "
                    f"this process has {ours}. Graphs go from one to the other, so "
                    "install the same version on both."
                )
            if status.state == "ready":
                return status
            reason = f"it works for {describe_clients(status)}"
            if status.state == "starting":
                reason = "TensorFlow is starting in it"
        if deadline.is_over:
            raise WorkerUnavailable(
                f"Worker {index} at {address} is not ready after "
                f"{deadline.seconds:.0f} s: {reason}. Is it started there, by `python "
                f"-m tfgpipe.cluster worker --port={address.port}`, and are ports "
                f"{address.port} and {address.health_port} open between the hosts?"
            )
        time.sleep(min(_POLL_SECONDS, deadline.left))
