"""The tests of this folder load no TensorFlow, and fail if they do."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


def _loaded() -> set[str]:
    return {"keras", "tensorflow"} & sys.modules.keys()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Iterator[None]:
    """Fails a file whose import loads TensorFlow."""
    before = _loaded()
    report = yield
    if loaded := _loaded() - before:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} loads {', '.join(sorted(loaded))}."
    return report


@pytest.fixture(autouse=True)
def loads_no_tensorflow() -> Iterator[None]:
    """Fails a test that loads TensorFlow."""
    before = _loaded()
    yield
    assert _loaded() == before
