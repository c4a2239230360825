"""A fork of this process, so that what it has imported is not imported again.

TensorFlow is imported in seconds and starts with the first operation, device list or
tensor. Until then its process may fork.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of this checkout, from `ROOT`."""
    return [sys.executable, "-m", module, *arguments]


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
