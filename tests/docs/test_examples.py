"""Examples have the form that readers can rely on."""

from __future__ import annotations

import re

import pytest

from tests.helpers.examples import (
    EXAMPLES,
    FOLDER,
    assert_ends_like,
    docstring,
    indented_blocks,
)

pytestmark = pytest.mark.pure

ROW = re.compile(r"^\| \[(\w+)\.py\]\(\1\.py\) \| (.+) \| (\d+) \|$", re.MULTILINE)


def test_the_readme_lists_every_example() -> None:
    rows = ROW.findall((FOLDER / "README.md").read_text("utf-8"))
    assert sorted(name for name, _, _ in rows) == sorted(EXAMPLES)
    for name, _, seconds in rows:
        assert f"takes {seconds} seconds" in docstring(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_docstring_has_the_command_and_what_it_prints(name: str) -> None:
    (command,), printed, *others = indented_blocks(name)
    assert re.search(rf"^python .*\bexamples/{name}\.py\b", command)
    assert printed
    assert not others
    summary, blank, *_ = docstring(name).splitlines()
    assert summary.endswith((".", "?"))
    assert not blank


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_short_and_uses_public_names_only(name: str) -> None:
    text = EXAMPLES[name].read_text("utf-8")
    assert 30 <= len(text.splitlines()) <= 90
    assert not re.search(r"(tfgpipe|keras|keras_hub)[\w.]*(\._|\.src\b)", text)


@pytest.mark.parametrize(
    "printed",
    [
        "loss 0.72 of stage 1",  # A decimal beyond 5%, and the unit.
        "loss 0.65 of stage 2",
        "loss 0.65 in stage 1",
        "loss 0.65 of stage",
        "",
    ],
)
def test_other_lines_are_told_apart(printed: str) -> None:
    promised = ["loss 0.65 of stage 1"]
    assert_ends_like(promised, "before\nloss  0.66 of stage 1\n")
    assert_ends_like(["without numbers"], "without numbers")
    with pytest.raises(AssertionError, match="promised"):
        assert_ends_like(promised, f"before\n{printed}\n")


def test_large_numbers_may_differ_a_little() -> None:
    assert_ends_like(["5,157 of 5170"], "5160 of 5170")
    with pytest.raises(AssertionError, match="promised"):
        assert_ends_like(["5,157 of 5170"], "4,157 of 5170")
