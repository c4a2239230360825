"""A Griffe extension: docstrings in the Keras form, as pages of the site.

Griffe reads Google's form. In the Keras form what follows `Example:` is not indented,
and there are sections such as `Input shape:`. Documents are named by their path in the
checkout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

# The pages of the API are two folders below the home page.
_PAGE = re.compile(r"`docs/([\w/-]+)\.md`")
_SECTION = re.compile(r"(Call arguments|Input shape|Output shape):$")
_ITEM = re.compile(r"^    (\*{0,2}[\w.]+): ")


class KerasDocstrings(griffe.Extension):
    """Rewrites docstrings before Griffe parses them, and hides private parameters."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Removes parameters with a leading underscore, which are not for users."""
        for parameter in list(func.parameters):
            if parameter.name.startswith("_"):
                del func.parameters[parameter.name]

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of an object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = google_form(obj.docstring.value)


def google_form(docstring: str) -> str:
    """Returns a docstring with fenced examples, sections of Keras, and links."""
    text = "\n".join(_lines(docstring.splitlines()))
    return _PAGE.sub(r"[\1](../../\1.md)", text)


def _lines(lines: list[str]) -> Iterator[str]:
    i = 0
    is_code = False
    while i < len(lines):
        line = lines[i]
        i += 1
        if line.lstrip().startswith("```"):
            is_code = not is_code
        if is_code:
            yield line
        elif line.lstrip().startswith(">>>"):
            indent = " " * (len(line) - len(line.lstrip()))
            yield f"{indent}```pycon"
            yield line
            while i < len(lines) and lines[i].strip():
                yield lines[i]
                i += 1
            yield f"{indent}```"
        elif line in ("Example:", "Examples:") and not _is_indented(lines[i:]):
            yield "**Example:**"
        elif _SECTION.match(line):
            yield f"**{line}**\n"
            while i < len(lines) and lines[i].startswith("    "):
                yield _ITEM.sub(r"- `\1`: ", lines[i]).removeprefix("    ")
                i += 1
        else:
            yield line


def _is_indented(lines: list[str]) -> bool:
    """Returns whether the next line that is not blank is indented."""
    return next((line for line in lines if line.strip()), "").startswith(" ")
