"""The page of commands has every program and every subcommand."""

from __future__ import annotations

import pytest

from docs import commands
from tests.helpers.subprocesses import ROOT
from tfgpipe_trainer import flags

pytestmark = pytest.mark.pure

# The library starts it by itself.
NOT_FOR_USERS = {"tfgpipe.accelerators.compile_process"}


def programs() -> set[str]:
    """Returns the modules of the library and the trainer that are programs."""
    found = set()
    for package in ("tfgpipe", "trainer", "params"):
        for path in (ROOT / package).rglob("*.py"):
            is_main = path.stem == "__main__"
            if is_main or 'if __name__ == "__main__"' in path.read_text("utf-8"):
                parts = path.relative_to(ROOT).with_suffix("").parts
                found.add(".".join(parts[:-1] if is_main else parts))
    return found


@pytest.fixture(scope="module")
def page() -> str:
    return commands.sections()


def test_every_program_has_a_section(page: str) -> None:
    assert programs() - NOT_FOR_USERS == set(commands.PROGRAMS)
    for name, explained in commands.PROGRAMS.items():
        assert f"## python -m {name}\n" in page
        assert (ROOT / "docs" / explained).is_file()


def test_every_subcommand_and_mode_is_there(page: str) -> None:
    for subcommand in ("worker", "launch"):
        assert f"### python -m tfgpipe.cluster {subcommand}\n" in page
    assert not [mode for mode in flags.MODES if mode not in page]


def test_flags_are_on_the_page(page: str) -> None:
    for flag in ("--params=NAME", "--max_restarts", "--batch_size", "--picture"):
        assert flag in page
