"""Docstrings in Google's form: entries that one takes over from another."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ENTRY = re.compile(r"^        (\*{0,2}\w+): ")


def entries(docstring: str | None) -> dict[str, list[str]]:
    """Returns the lines of each argument or attribute that a docstring describes.

    >>> entries('''Adds.
    ...
    ...     Args:
    ...         x: The first number,
    ...             or the only one.
    ...         y: The second.
    ...     ''')
    {'x': ['        x: The first number,', '            or the only one.'], \
'y': ['        y: The second.']}
    """
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in (docstring or "").splitlines():
        start = _ENTRY.match(line)
        if start:
            lines = found[start[1]] = [line]
        elif lines is not None and line.startswith(" " * 12):
            lines.append(line)
        else:
            lines = None
    return found


def with_entries(docstring: str | None, name: str, others: Sequence[str]) -> str | None:
    """Returns a docstring with other entries in the place of one.

    Args:
        docstring: The docstring; None, as with `python -OO`, stays so.
        name: The name of the entry.
        others: The lines of the others.
    """
    if docstring is None:
        return None
    own = "\n".join(entries(docstring)[name])
    return docstring.replace(own, "\n".join(others))
