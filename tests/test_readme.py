"""What the documentation says works: code blocks run, targets and links exist."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.reference import anchor
from tests.forks import Server
from tests.pure.test_import_floors import BESIDE, FLOORS
from tfgpipe import schedules
from tfgpipe.schedule import draw

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def _blocks(document: Path, *languages: str) -> list[str]:
    """Returns the fenced code blocks of a document in any of the languages."""
    fence = rf"^```(?:{'|'.join(languages)})\n(.*?)^```$"
    return re.findall(fence, document.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def _name(block: str) -> str:
    return block.strip().splitlines()[-1][:40]


def _printed(document: Path) -> dict[str, str]:
    """Returns what a document says that its blocks print, among other things."""
    fences = re.findall(
        r"^```([\w ]*)\n(.*?)^```$", document.read_text("utf-8"), re.M | re.S
    )
    pairs = itertools.pairwise(fences)
    return {
        block: printed
        for (language, block), (kind, printed) in pairs
        if (language, kind) == ("python", "text printed")
    }


PRINTED = {block: text for d in DOCUMENTS for block, text in _printed(d).items()}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize(
    "block", [b for d in DOCUMENTS for b in _blocks(d, "python")], ids=_name
)
def test_python_block_runs(block: str, server: Server, tmp_path: Path) -> None:
    run = server.run(block, cwd=tmp_path)
    assert run.returncode == 0, run.output
    for line in PRINTED.get(block, "").splitlines():
        assert line in run.output, run.output


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_commands_exist(document: Path) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shell = "\n".join(_blocks(document, "bash", "console"))
    commands = re.findall(r"^\$? ?make(?: +[A-Z]+=\S+)* +([a-z]+)", shell, re.MULTILINE)
    assert set(commands) <= set(targets)


def test_the_readme_starts_with_the_two_commands() -> None:
    first = _blocks(README, "bash", "console")[0]
    assert re.findall(r"^make (\w+)", first, re.MULTILINE) == ["train", "test"]


def test_the_picture_is_the_schedule() -> None:
    rows = re.findall(r"^(stage \d .*?)(?:    .*)?$", _blocks(README, "text")[0], re.M)
    assert "\n".join(rows) == draw(schedules.gpipe(4, 4))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", document.read_text("utf-8"))
    assert not [link for link in links if not (document.parent / link).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_into_documents_lead_to_a_heading(document: Path) -> None:
    links = re.findall(
        r"\]\((?![a-z]+:)([^)#\s]*)#([^)\s]+)\)", document.read_text("utf-8")
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


@functools.cache
def _source(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / "docs" / "rooms.md").read_text("utf-8")
    floor, there = 0, {}
    for number, room in re.findall(r"^\| (\d*)[^|`]*\| `(\w+)` \|", text, re.MULTILINE):
        floor = int(number or floor)
        there[room] = floor
    wanted = {room: int(floor) for room, floor in FLOORS.items() if room != "__init__"}
    assert {room: there.get(room) for room in wanted} == wanted
    assert set(there) == {*wanted, *BESIDE}
