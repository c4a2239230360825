"""`--slice=I/N`: the cases of one of N parts, so that each landing runs another."""

from __future__ import annotations

import re
import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice",
        metavar="I/N",
        help="of the tests in tests/nightly, run part I of N; I from 1 to N",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves the cases whose name falls into the part that is asked for."""
    asked = config.getoption("slice")
    if asked is None:
        return
    read = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", asked)
    if not read or int(read[1]) > int(read[2]):
        raise pytest.UsageError(
            f"--slice takes I/N with I from 1 to N, such as 2/6. Received {asked!r}."
        )
    part, parts = int(read[1]), int(read[2])
    taken: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        mine = zlib.crc32(item.nodeid.encode()) % parts == part - 1
        (taken if mine else left).append(item)
    items[:] = taken
    config.hook.pytest_deselected(items=left)
