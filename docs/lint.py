"""Checks the words of docstrings: `make lint`.

An argument, an attribute or a class is documented by a noun phrase that names the thing
("Dtype of activations on the wire."), not by a clause ("What values are compressed
to"), and by itself, not by pointing at another ("Likewise."). A function is documented
by a verb, and says what it returns by a noun.

It reads `Args:`, `Attributes:` and `Call arguments:`, strings below the fields of a
class, `help=` of hyperparameters and flags, and first lines of classes and functions.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tfgpipe", "trainer", "params")

_QUESTION = r"(?:what|which|who|whose|how|where|when|why|whether)(?:ever)?\b"
_CLAUSE = re.compile(
    rf"(?:(?:after|at|by|for|from|in|of|on|to|with) )?{_QUESTION}", re.I
)
_POINTER = re.compile(r"\blikewise\b|^as (?:for|of) |\bof it\b", re.I)
# No noun phrases either: "Of the base layer.", "That of the inputs.".
_FRAGMENT = re.compile(r"(?:of|that|those|it)\b", re.I)
_RETURNS = re.compile(rf"(?:Returns|Yields) (?!whether){_QUESTION}")
_SECTION = re.compile(r"(?:Args|Arguments|Attributes|Call arguments):$")
_ENTRY = re.compile(r"    (\*{0,2}\w[\w.]*(?:, \*{0,2}\w+)*)(?: \([^)]*\))?:(?: |$)")


def problems(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line of each docstring with a clause or a pointer, and its text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _problems_of_docstring(node)
        if isinstance(node, ast.ClassDef):
            yield from _problems_of_fields(node)
        if isinstance(node, ast.keyword) and node.arg == "help":
            yield from _problems_of_text("help", _string(node.value), node.value.lineno)


def entries(docstring: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of all arguments and attributes of a docstring."""
    name, text, is_open = "", [""], False
    for line in [*docstring.splitlines(), "end"]:
        if (line.strip() and not line.startswith("    ")) or _ENTRY.match(line):
            if name:
                yield name, " ".join(" ".join(text).split())
            name = ""
        if line.strip() and not line.startswith(" "):
            is_open = bool(_SECTION.match(line))
        elif is_open and (entry := _ENTRY.match(line)):
            name, text = entry[1], [line[entry.end() :]]
        elif name:
            text.append(line)


def _problems_of_docstring(
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[int, str]]:
    docstring = ast.get_docstring(node) or ""
    for name, text in entries(docstring):
        yield from _problems_of_text(name, text, node.lineno)
    first = docstring.partition("\n")[0]
    if _CLAUSE.match(first) or _RETURNS.match(first):
        yield node.lineno, f"{node.name}: {first}"


def _problems_of_fields(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Yields those of strings below fields of a class."""
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, (ast.AnnAssign, ast.Assign)) and isinstance(
            below, ast.Expr
        ):
            name = ast.unparse(field).partition(":")[0].partition(" =")[0]
            yield from _problems_of_text(name, _string(below.value), below.lineno)


def _problems_of_text(name: str, text: str, line: int) -> Iterator[tuple[int, str]]:
    if any((_CLAUSE.match(text), _POINTER.search(text), _FRAGMENT.match(text))):
        yield line, f"{name}: {text}"


def _string(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    return ""


def files() -> Iterator[Path]:
    """Yields the modules to check."""
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def main() -> int:
    """Prints the problems, and returns the status of the process."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files()
        for line, text in problems(path.read_text("utf-8"))
    ]
    for problem in found:
        print(problem, file=sys.stderr)
    if found:
        print(
            "Document an argument or attribute by a noun phrase that names it, not by "
            "a clause that begins with What, Which, How, Where, When or Whether, nor "
            "by pointing at another. A function returns a noun.",
            file=sys.stderr,
        )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
