"""Installed distributions, which need not have the name of the package in them."""

from __future__ import annotations

import contextlib
import importlib.metadata

# Those that `setup.py` can require.
TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu")


def installed_version(*names: str) -> str | None:
    """Returns the version of the first of these distributions that is installed."""
    return next(iter(installed_versions(*names).values()), None)


def installed_versions(*names: str) -> dict[str, str]:
    """Returns by name the versions of those that are installed; none is imported."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
