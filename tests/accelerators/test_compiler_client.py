"""The client of a compiler, with a process that only answers as one would."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time

import pytest

from tfgpipe.accelerators import Compiler, compilers, find, missing

pytestmark = pytest.mark.pure

_PROCESS = """
import json, os, sys, time
from multiprocessing.connection import Connection

print("noise of a native library", flush=True)
connection = Connection(int(sys.argv[1]))
connection.send_bytes(b"{}")
while True:
    try:
        request = json.loads(connection.recv_bytes())
        module = connection.recv_bytes()
    except EOFError:
        break
    if module == b"abort":
        print("F0101 00:00:00.1 22 file.cc:7] Check failed: a == b ", file=sys.stderr)
        print("    @ 0x1234 stack", file=sys.stderr, flush=True)
        os.abort()
    if module == b"exit":
        os._exit(3)
    if module == b"sleep":
        time.sleep(60)
    if module == b"wrong":
        answer = {"seconds": 0.5, "error": "INVALID_ARGUMENT: no such thing"}
    else:
        answer = {
            "seconds": 0.25,
            "code_bytes": os.getpid(),
            "argument_bytes": len(module),
            "temp_bytes": request["num_partitions"],
            "collectives": {request["topology"]["topology_name"]: 1},
        }
    connection.send_bytes(json.dumps(answer).encode())
"""


@pytest.fixture
def compiler(tmp_path):
    file = tmp_path / "process.py"
    file.write_text(textwrap.dedent(_PROCESS), "utf-8")
    with Compiler(
        "tpu-v5e", command=[sys.executable, str(file)], timeout_seconds=5.0
    ) as made:
        yield made


def test_modules_are_sent_to_one_process(compiler):
    first = compiler.compile(b"x" * 1_000_000)
    second = compiler.compile(b"xy", num_partitions=8)
    assert (first.argument_bytes, first.temp_bytes) == (1_000_000, 1)
    assert (second.argument_bytes, second.temp_bytes) == (2, 8)
    assert second.collectives == {"v5e:2x4": 1}
    assert first.code_bytes == second.code_bytes
    assert first.error is None
    assert compiler.start_seconds > 0


def test_an_error_is_a_result(compiler):
    wrong = compiler.compile(b"wrong")
    assert (wrong.error, wrong.seconds) == ("INVALID_ARGUMENT: no such thing", 0.5)


@pytest.mark.parametrize(
    ("module", "error"),
    [(b"abort", r"SIGABRT: F0101 .*Check failed: a == b$"), (b"exit", r"status 3\.$")],
)
def test_a_process_that_dies_is_an_error_and_another_follows(compiler, module, error):
    before = compiler.compile(b"x").code_bytes
    died = compiler.compile(module)
    assert died.error is not None
    assert re.search(error, died.error), died.error
    after = compiler.compile(b"x")
    assert after.error is None
    assert after.code_bytes != before


def test_a_process_that_hangs_is_ended(compiler):
    compiler.compile(b"x")
    compiler._timeout_seconds = 0.5
    hung = compiler.compile(b"sleep")
    assert hung.error == "The compiler has not answered for 0.5 seconds."
    assert compiler.compile(b"x").error is None


def test_a_process_that_does_not_start_is_an_error():
    with Compiler("tpu-v5e", command=[sys.executable, "-c", "1 / 0"]) as broken:
        error = broken.compile(b"x").error
    assert "status 1: ZeroDivisionError: division by zero" in error


def test_the_process_ends_with_the_context(compiler):
    pid = compiler.compile(b"x").code_bytes
    compiler.__exit__()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_process_ends_with_its_parent(compiler):
    """Its socket closes, whatever has ended the parent."""
    compiler.compile(b"x")
    process = compiler._process
    process._connection.close()
    deadline = time.monotonic() + 10
    while process._process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process._process.returncode == 0


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(compilers, "_is_installed", lambda name: name == "jax")
    assert missing(find("tpu-v4")) == ["jaxlib", "libtpu"]
    assert "nvidia-cuda-nvcc-cu12" in missing()
    with pytest.raises(ModuleNotFoundError, match=r"libtpu.*tfgpipe\[compilers\]"):
        Compiler("tpu-v4")
