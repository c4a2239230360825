"""Shared set-up, and the marks of tests.

A file with `pytestmark = pytest.mark.pure` needs no TensorFlow, and fails if it loads
it. For the others TensorFlow starts, on eight logical CPUs. Tests with
`pytest.mark.nightly` run with `-m nightly`, all or one of N parts, `--slice=I/N`, so
that each landing can run another. Files without a test that `-m` asks for are not
imported.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

# Steps here are small, and stand for large ones, whose functions are not inlined; so do
# those of processes that tests start.
os.environ.setdefault("TFGPIPE_FEW_OPERATIONS", "0")

# How long an example takes says nothing on a machine that is busy.
hypothesis.settings.register_profile("tfgpipe", deadline=None)
hypothesis.settings.load_profile("tfgpipe")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice",
        metavar="I/N",
        help="run part I of N of the tests that are asked for; I from 1 to N",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files without a test that is asked for."""
    if not collection_path.name.startswith("test_"):
        return None
    asked = config.option.markexpr
    is_left_out = (
        (asked in ("pure", "pure and not nightly") and not _is_pure(collection_path))
        or (asked.endswith("not nightly") and _has(collection_path, "nightly"))
        or (asked == "nightly" and "nightly" not in collection_path.read_text("utf-8"))
    )
    return True if is_left_out else None


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Starts TensorFlow before a file that may use it is imported."""
    if isinstance(collector, pytest.Module) and not _is_pure(collector.path):
        _start_tensorflow()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Iterator[None]:
    """Fails a pure file whose import loads TensorFlow."""
    before = _loaded()
    report = yield
    loaded = _loaded() - before
    if loaded and isinstance(collector, pytest.Module) and _is_pure(collector.path):
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} loads {', '.join(sorted(loaded))}."
    return report


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


def _has(path: Path, mark: str) -> bool:
    """Returns whether all tests of a file have a mark."""
    whole = rf"^pytestmark = \[?\s*pytest\.mark\.{mark}\b"
    return bool(re.search(whole, path.read_text("utf-8"), re.MULTILINE))


def _is_pure(path: Path) -> bool:
    return _has(path, "pure")


def _loaded() -> set[str]:
    return {"keras", "tensorflow"} & sys.modules.keys()


def _start_tensorflow() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras  # noqa: F401

    import tfgpipe

    tfgpipe.make_logical_cpus(8)


@pytest.fixture(autouse=True)
def loads_no_tensorflow(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a pure test that loads TensorFlow."""
    before = _loaded()
    yield
    if request.node.get_closest_marker("pure"):
        assert _loaded() == before


@pytest.fixture(autouse=True)
def fresh_names_and_seeds() -> None:
    """Layer names and random draws do not depend on which tests ran before."""
    if "keras" in sys.modules:
        import keras

        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)


@pytest.fixture
def floatx() -> Iterator[Callable[[str], None]]:
    """Sets the dtype of everything that is made in a test."""
    import keras

    yield keras.config.set_floatx
    keras.config.set_floatx("float32")
    # Keras keeps the policy that it made of the other dtype.
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Computes in double precision, losses as well."""
    import keras

    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


@pytest.fixture
def mixed_precision() -> Iterator[None]:
    """Computes in half precision, and keeps weights in single."""
    import keras

    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")
