"""The distributions of TensorFlow, which have different names and the same files."""

from __future__ import annotations

import contextlib

TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu")
"""Those that `setup.py` can require."""


def installed_tensorflows() -> dict[str, str]:
    """Returns the versions of those that are installed, by name; imports none.

    Of two, the one that pip installed last has replaced files of the other.
    """
    import importlib.metadata  # Here, as it takes longer than all of this package.

    found = {}
    for name in TENSORFLOWS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
