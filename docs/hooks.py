"""Hooks of MkDocs: pages made at build time, and links to files outside `docs/`.

    tutorial/guide.md              the executed notebook, and its pictures
    reference/hyperparameters.md   its tables, from the classes of the trainer
    reference/commands.md          its texts, from the `--help` of each program
    source/...                     files that pages link to: code, other documents

Links in the pages are those of the checkout, so that they also work in an editor.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files

from docs import commands, hyperparameters, render

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?:\[`([\w.]+)`)?\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
# What says how a block of code is tested is not for readers.
_FENCE = re.compile(r"^( *```\w+) [\w ]+$", re.MULTILINE)
_LINE = "?line="
# Pages that stand for files.
_PAGES = {
    "README.md": "index.md",
    "docs/tutorial/guide.ipynb": "tutorial/guide.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made at build time."""
    notebook = nbformat.read(render.NOTEBOOK, as_version=4)
    guide, pictures = render.page(notebook)
    pages = {
        f"docs/{file.src_uri}": Path(str(file.abs_src_path)).read_text("utf-8")
        for file in files.documentation_pages()
    }
    made = {
        "tutorial/guide.md": guide,
        **{f"tutorial/{render.PICTURES}/{name}": pictures[name] for name in pictures},
        **_sources({**pages, "docs/tutorial/guide.md": guide}),
    }
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def _sources(pages: dict[str, str]) -> dict[str, str | bytes]:
    """Returns the files outside `docs/` that pages, or these files, link to."""
    made: dict[str, str | bytes] = {}
    left = list(pages.items())
    while left:
        path, text = left.pop()
        for found in _LINK.finditer(text):
            target = _target(path, found[2])
            if target is None or _uri(target) in made or not _is_outside(target):
                continue
            source = ROOT / target
            if source.suffix == ".png":
                made[_uri(target)] = source.read_bytes()
                continue
            content = source.read_text("utf-8")
            made[_uri(target)] = _page(target, content)
            if source.suffix == ".md":
                left.append((target, content))
    return made


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points the links of a page to the pages that stand for their targets."""
    uri = page.file.src_uri
    if uri == "reference/hyperparameters.md":
        markdown = f"{markdown}\n\n{hyperparameters.tables()}"
    if uri == "reference/commands.md":
        markdown = f"{markdown}\n\n{commands.sections()}"
    path = uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"
    if path.endswith(".py.md"):
        return markdown
    return _FENCE.sub(r"\1", with_links(markdown, path, uri))


def on_page_content(html: str, **_: Any) -> str:
    """Points links to a line of code to its anchor, which MkDocs does not know of."""
    return re.sub(rf"{re.escape(_LINE)}(\d+)\"", r'#__codelineno-0-\1"', html)


def with_links(markdown: str, path: str, uri: str) -> str:
    """Returns Markdown with links between pages of the site.

    A link from a name in code, such as ``[`Mesh`](mesh.py)``, leads to its definition.

    Args:
        markdown: The text, with links as in the checkout.
        path: The file in the checkout that the links start from.
        uri: The page of the site that it becomes.
    """

    def link(found: re.Match[str]) -> str:
        name, _, anchor = found.groups()
        target = _target(path, found[2])
        if target is None:
            return found[0]
        moved = os.path.relpath(_uri(target), os.path.dirname(uri))
        if name and target.endswith(".py"):
            line = line_of(name, (ROOT / target).read_text("utf-8"))
            anchor = f"{_LINE}{line}" if line else ""
        text = f"[`{name}`" if name else ""
        return f"{text}]({moved}{anchor or ''})"

    return _LINK.sub(link, markdown)


def line_of(name: str, code: str) -> int | None:
    r"""Returns the line of a definition, or None where code does not define it.

    >>> line_of("Mesh.shape", "class Mesh:\n    def shape(self):")
    2
    """
    lines = code.splitlines()
    number = 0
    for part in name.split("."):
        definition = re.compile(rf" *(def|class) {part}\b")
        rest = range(number, len(lines))
        found = next((i for i in rest if definition.match(lines[i])), None)
        if found is None:
            return None
        number = found
    return number + 1


def _target(path: str, link: str) -> str | None:
    """Returns the file that a link leads to, or None if there is none of that name.

    Code that looks like a link has none.
    """
    target = os.path.normpath(os.path.join(os.path.dirname(path), link))
    return target if (ROOT / target).is_file() else None


def _is_outside(target: str) -> bool:
    if target in _PAGES:
        return False
    return not target.startswith("docs/") or target.endswith(".py")


def _uri(target: str) -> str:
    """Returns the page of the site that stands for a file of the checkout."""
    if target in _PAGES:
        return _PAGES[target]
    if not _is_outside(target):
        return target.removeprefix("docs/")
    return f"source/{target}" + ("" if target.endswith((".md", ".png")) else ".md")


def _page(target: str, content: str) -> str:
    """Returns the page that shows a file: a document, or code with line numbers."""
    if target.endswith(".md"):
        return content
    language = {".py": "python", ".toml": "toml"}.get(Path(target).suffix, "text")
    fence = "~" * 8
    return (
        "---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n"
        f'# {target}\n\n{fence} {{ .{language} linenums="1" }}\n{content}{fence}\n'
    )
