"""What documents name is there: targets, links, headings, tests."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfgpipe import schedules
from tfgpipe.schedules.schedule import draw

ROOT = Path(__file__).resolve().parents[3]
LINE_LINK = re.compile(r"\[`([\w.]+)`\]\((?![a-z]+:)([\w./-]+\.py)\)")
README = ROOT / "README.md"
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.md"),
    ]
)


def blocks(document: Path, *languages: str) -> list[str]:
    """Returns the fenced code blocks of a document in any of the languages."""
    fence = rf"^```(?:{'|'.join(languages)})\n(.*?)^```$"
    return re.findall(fence, document.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def anchor(title: str) -> str:
    """Returns what a link to a heading ends with."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_commands_exist(document: Path) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shell = "\n".join(blocks(document, "bash", "console"))
    commands = re.findall(r"^\$? ?make(?: +[A-Z]+=\S+)* +([a-z]+)", shell, re.MULTILINE)
    assert set(commands) <= set(targets)


def test_the_picture_is_the_schedule() -> None:
    rows = re.findall(r"^(stage \d .*?)(?:    .*)?$", blocks(README, "text")[0], re.M)
    assert "\n".join(rows) == draw(schedules.gpipe(4, 4))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", document.read_text("utf-8"))
    assert not [link for link in links if not (document.parent / link).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_into_documents_lead_to_a_heading(document: Path) -> None:
    links = re.findall(
        r"\]\((?![a-z]+:)([^)#\s]*(?<!\.py))#([^)\s]+)\)", document.read_text("utf-8")
    )
    for path, heading in links:
        target = document.parent / path if path else document
        fenced = re.sub(
            r"^```.*?^```$", "", target.read_text("utf-8"), flags=re.M | re.S
        )
        headings = re.findall(r"^#+ (.*)$", fenced, re.MULTILINE)
        assert heading in {anchor(title) for title in headings}, (path, heading)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_and_benchmarks_that_are_named_exist(document: Path) -> None:
    named = re.findall(
        r"`((?:tests|benchmarks)/[\w/]+\.py)(?:::(\w+))?`", document.read_text("utf-8")
    )
    for path, function in named:
        source = _source(path)
        assert not function or re.search(
            rf"^ *def {function}\(", source, re.MULTILINE
        ), (
            path,
            function,
        )


@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if path.parent.name == "contributing"],
    ids=lambda path: path.name,
)
def test_modules_that_contributors_are_sent_to_exist(document: Path) -> None:
    text = document.read_text("utf-8")
    for name in re.findall(r"`((?:tfgpipe|trainer|params)(?:\.\w+)+)`", text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), name


def test_messages_of_errors_are_those_of_the_code() -> None:
    """`...` stands for anything. Those of argparse and TensorFlow are left out."""
    code = " ".join(
        text
        for top in ("tfgpipe", "trainer", "params")
        for path in (ROOT / top).rglob("*.py")
        for text in _texts(ast.parse(path.read_text("utf-8")))
    )
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    own = page.partition("## Errors of TensorFlow")[0]
    others = ("message", "status", "argument", "the following", "one of the", "unrec")
    unknown = [
        message
        for message in re.findall(r"^\| (.*?) \| ", own, re.MULTILINE)
        if not message.startswith(others)
        for part in re.split(r"\.\.\.+", message)
        for words in [part.strip(" .,:;'`")]
        if len(words) > 3 and words not in code
    ]
    assert not unknown


def _texts(tree: ast.AST) -> Iterator[str]:
    """Yields the texts in a module, with a gap for each value in an f-string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "\0".join(
                str(x.value) for x in node.values if isinstance(x, ast.Constant)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_link_from_a_name_in_code_leads_to_its_definition(document: Path) -> None:
    """On the site such a link leads to the line."""
    for name, path in LINE_LINK.findall(document.read_text("utf-8")):
        source = (document.parent / path).read_text("utf-8")
        for part in name.split("."):
            assert re.search(rf"^ *(def|class) {part}\b", source, re.M), (name, path)


@functools.cache
def _source(path: str) -> str:
    return (ROOT / path).read_text("utf-8")
