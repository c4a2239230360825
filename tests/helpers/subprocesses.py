"""Processes of tests: forks of this one, and fresh interpreters.

A fork does not import again what this process has imported. TensorFlow is imported in
seconds and starts with the first operation, device list or tensor; until then its
process may fork.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of this checkout, from `ROOT`."""
    return [sys.executable, "-m", module, *arguments]


def interpret(
    program: str, *arguments: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs the text of a program, with arguments, by `python` with its options."""
    return python("-c", program, *arguments, **options)


def python(
    *arguments: str,
    cwd: Path = ROOT,
    without: Collection[str] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a fresh interpreter, which finds this checkout.

    Args:
        arguments: Its command line.
        cwd: The folder it runs in.
        without: Variables of this process' environment that it does not get.
        variables: More variables of its environment.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in without}
    # `make test-keras` has another Keras on the path.
    paths = [str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**inherited, "PYTHONPATH": os.pathsep.join(paths), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def fork(life: Callable[[], int]) -> int:
    """Runs a function in a fork of this process, which ends with what it returns.

    Returns:
        The fork's process number.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        status = life()
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            status = ended.code or 0
        else:
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # Without waiting for threads of TensorFlow's.
