"""The site builds without a warning, and needs nothing from elsewhere."""

from __future__ import annotations

import html.parser
import re
import urllib.parse
from pathlib import Path

import pytest

from tests.helpers.subprocesses import python


class Links(html.parser.HTMLParser):
    """What a page loads, what it links to, and the anchors in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids |= {values.get("id") or "", values.get("name") or ""}
        where = values.get("src") or values.get("href")
        if where:
            (self.linked if tag == "a" else self.loaded).append(where)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Links]:
    """The pages of a new build, by path."""
    folder = tmp_path_factory.mktemp("site")
    command = ("-m", "mkdocs", "build", "--strict", f"--site-dir={folder}")
    run = python(*command, NO_MKDOCS_2_WARNING="1")
    assert run.returncode == 0, run.stderr
    return {path: Links(path) for path in sorted(folder.rglob("*.html"))}


def test_nothing_is_loaded_from_another_host(site: dict[Path, Links]) -> None:
    outside = re.compile(r"(https?:)?//")
    assert {path.name: links.loaded for path, links in site.items()}
    assert not [
        (path.name, where)
        for path, links in site.items()
        for where in links.loaded
        if outside.match(where)
    ]


def test_links_lead_to_a_page_and_an_anchor(site: dict[Path, Links]) -> None:
    broken = []
    for path, links in site.items():
        if path.name == "404.html":
            continue  # Its links are absolute.
        for where in {*links.linked, *links.loaded}:
            parts = urllib.parse.urlsplit(where)
            if parts.scheme or not (parts.path or parts.fragment):
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve()
            target = target if parts.path else path
            found = target.exists()
            if found and parts.fragment and target.suffix == ".html":
                found = urllib.parse.unquote(parts.fragment) in site[target].ids
            if not found:
                broken.append((path.name, where))
    assert not broken


def test_pages_that_are_made_have_their_contents(site: dict[Path, Links]) -> None:
    pages = {path.name: path.read_text("utf-8") for path in site}
    assert "training.num_steps" in pages["hyperparameters.html"]
    assert "python -m tfgpipe.cluster launch" in pages["commands.html"]
    assert "PipelinedLayer" in pages["pipelines.html"]
    assert 'src="guide/schedule-drawn.png"' in pages["guide.html"]
