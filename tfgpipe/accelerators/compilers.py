"""A compiler of an accelerator that is not there, in a process of its own.

XLA ends its process at a failed check, and JAX' copy of it does not go into a process
with TensorFlow's. So the compiler is a process to which HLO modules are sent; one that
dies leaves an error, and the next module starts another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import multiprocessing
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from tfgpipe.accelerators.platforms import Platform, find

_PACKAGES = {
    "tpu": ("jax", "jaxlib", "libtpu"),
    "gpu": (
        "jax",
        "jaxlib",
        "jax-cuda12-plugin",
        "jax-cuda12-pjrt",
        "nvidia-cuda-nvcc-cu12",
    ),
}
# By its file, which works from any folder, and without that folder on the path.
_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("compile_process.py")))
_START_SECONDS = 120.0
# How XLA's log marks what ends the process, and what Python says at last.
_FATAL = re.compile(r"^(?:F\d{4} .*?\] |.*Check failed: |\w*Error: ).*", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiler's report on a module. Figures are 0 if there is an error.

    Attributes:
        seconds: Time of compilation.
        code_bytes: Machine code, for one device as all that follows. Of a GPU the
            serialized executable, which is compressed.
        argument_bytes: Bytes of its arguments.
        output_bytes: Bytes of its results.
        temp_bytes: Bytes of temporary memory.
        flops: Floating point operations by XLA's count; on GPUs with those of cuDNN on
            a convolution's padding. A loop of unknown length counts once.
        bytes_accessed: Bytes that its kernels read and write, by XLA's count.
        collectives: Number of each in the optimized module.
        remark: Difference from compilation on a machine with the device, or None.
        error: The first line of what the compiler says if it fails, or None.
    """

    seconds: float
    code_bytes: int = 0
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    flops: float = 0.0
    bytes_accessed: float = 0.0
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    remark: str | None = None
    error: str | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of arguments, results and temporary memory."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes


class Compiler:
    """The compiler of one platform, a process that lives as long as the context.

    Args:
        platform: The platform to compile for, or its name.
        timeout_seconds: Time limit of a module.
        command: Command that starts the process, for tests.

    Attributes:
        platform: The platform that it compiles for.
        start_seconds: Time that the process took to start, 0 before.

    Raises:
        ModuleNotFoundError: If packages are not installed.
        ValueError: If there is no platform of that name.

    Example:

        with Compiler("tpu-v5e") as compiler:
            print(compiler.compile(hlo(function, *specs)).temp_bytes)
    """

    def __init__(
        self,
        platform: Platform | str,
        *,
        timeout_seconds: float = 600.0,
        command: Sequence[str] | None = None,
    ) -> None:
        self.platform = find(platform) if isinstance(platform, str) else platform
        self.start_seconds = 0.0
        self._timeout_seconds = timeout_seconds
        self._command = tuple(command or _COMMAND)
        self._process: _Process | None = None
        if command is None and (packages := missing(self.platform)):
            raise ModuleNotFoundError(
                f"Compiling for {self.platform.name} needs {', '.join(packages)}. "
                "Install `tfgpipe[compilers]`."
            )

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *unused: object) -> None:
        self._end()

    def compile(self, hlo: bytes, *, num_partitions: int = 1) -> Compiled:
        """Returns the compiler's report on a module, or its error.

        Args:
            hlo: A serialized `HloModuleProto`.
            num_partitions: Over how many devices XLA partitions it, by the shardings
                that it names.

        Raises:
            ValueError: If the platform has no topology of as many devices.
        """
        topology = self.platform.topology(num_partitions)
        started = time.perf_counter()
        try:
            self._process = process = self._process or self._start()
            request = {"topology": topology, "num_partitions": num_partitions}
            process.send(json.dumps(request).encode(), hlo)
            answer = process.receive(self._timeout_seconds)
        except _ProcessError as error:
            self._end()
            seconds = time.perf_counter() - started
            return Compiled(seconds=seconds, error=str(error))
        return Compiled(**answer)

    def _start(self) -> _Process:
        started = time.perf_counter()
        self._process = process = _Process(self._command)
        process.receive(_START_SECONDS)
        self.start_seconds = time.perf_counter() - started
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


def missing(platform: Platform | None = None) -> list[str]:
    """Returns the packages of the extra `compilers` that are not installed.

    Args:
        platform: The platforms that this one needs; None for all.
    """
    kinds = _PACKAGES if platform is None else (platform.kind,)
    wanted = dict.fromkeys(name for kind in kinds for name in _PACKAGES[kind])
    return [name for name in wanted if not _is_installed(name)]


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class _ProcessError(Exception):
    """The process has ended, or does not answer."""


class _Process:
    """A process that answers messages.

    Args:
        command: The command that starts it; the number of its socket's descriptor is
            added.
    """

    def __init__(self, command: Sequence[str]) -> None:
        # Has no name, so that it is gone once it is closed.
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._connection: Connection
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [*command, str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )

    def send(self, *messages: bytes) -> None:
        """Sends messages.

        Raises:
            _ProcessError: If the process has ended.
        """
        try:
            for message in messages:
                self._connection.send_bytes(message)
        except OSError:
            raise self._ended() from None

    def receive(self, timeout_seconds: float) -> Any:
        """Returns its answer, from JSON.

        Raises:
            _ProcessError: If the process ends before, or takes too long.
        """
        try:
            if not self._connection.poll(timeout_seconds):
                raise _ProcessError(
                    f"The compiler has not answered for {timeout_seconds:g} seconds."
                )
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._ended() from None

    def end(self) -> None:
        """Kills it."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _ended(self) -> _ProcessError:
        """Describes the end of the process, with its last messages."""
        try:
            status = self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            return _ProcessError("The compiler does not listen any more.")
        how = f"status {status}"
        if status < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-status).name
        self._log.seek(0)
        said = _FATAL.findall(self._log.read().decode("utf-8", "replace"))
        reason = f": {said[-1].strip()}" if said else "."
        return _ProcessError(f"The compiler's process ended with {how}{reason}")
