"""What documents name is there: targets, links, headings, tests."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.helpers.documents import DOCUMENTS, blocks
from tests.helpers.subprocesses import ROOT

pytestmark = pytest.mark.pure

LINE_LINK = re.compile(r"\[`([\w.]+)`\]\((?![a-z]+:)([\w./-]+\.py)\)")


def title(document: Path) -> str:
    """Returns the path of a document, as pytest shows it."""
    return str(document.relative_to(ROOT))


def anchor(heading: str) -> str:
    """Returns what a link to a heading ends with."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=title)
def test_make_commands_exist(document: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shell = "\n".join(blocks(document, "bash", "console"))
    commands = re.findall(
        r"^\$? ?make(?: +[A-Z]+=\S+)* +([a-z-]+)", shell, re.MULTILINE
    )
    assert set(commands) <= set(targets)


@pytest.mark.parametrize("document", DOCUMENTS, ids=title)
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", document.read_text("utf-8"))
    assert not [link for link in links if not (document.parent / link).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=title)
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=title)
def test_tests_and_benchmarks_that_are_named_exist(document: Path) -> None:
    text = document.read_text("utf-8")
    assert not re.findall(r"`test_\w+\.py", text), "a test is named with its folder"
    named = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)(?:::(\w+))?`", text)
    for path, function in named:
        source = _source(path)
        assert not function or re.search(
            rf"^ *def {function}\(", source, re.MULTILINE
        ), (
            path,
            function,
        )


@pytest.mark.parametrize("document", DOCUMENTS, ids=title)
def test_modules_that_commands_run_exist(document: Path) -> None:
    commands = re.findall(
        r"python -m ((?:benchmarks|docs|tests|tfgpipe|trainer)[\w.]*\w)",
        document.read_text("utf-8"),
    )
    for name in commands:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if path.parent.name == "contributing"],
    ids=title,
)
def test_modules_that_contributors_are_sent_to_exist(document: Path) -> None:
    text = document.read_text("utf-8")
    for name in re.findall(r"`((?:tfgpipe|trainer|params)(?:\.\w+)+)`", text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=title)
def test_a_link_from_a_name_in_code_leads_to_its_definition(document: Path) -> None:
    """On the site such a link leads to the line."""
    for name, path in LINE_LINK.findall(document.read_text("utf-8")):
        source = (document.parent / path).read_text("utf-8")
        for part in name.split("."):
            assert re.search(rf"^ *(def|class) {part}\b", source, re.M), (name, path)


@functools.cache
def _source(path: str) -> str:
    return (ROOT / path).read_text("utf-8")
