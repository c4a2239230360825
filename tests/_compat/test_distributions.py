"""The version of TensorFlow is found under each of its names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tfgpipe._compat import distributions
from tfgpipe.cluster import health

pytestmark = pytest.mark.pure


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], None]:
    """Returns a function that installs a distribution without any files."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])

    def install(name: str, version: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")

    return install


@pytest.mark.parametrize("name", distributions.TENSORFLOWS)
def test_a_tensorflow_of_any_name_has_its_version(name: str, install) -> None:
    assert distributions.installed_tensorflows() == {}
    assert health.version("tensorflow") == "none"
    install(name, "2.20.0")
    assert distributions.installed_tensorflows() == {name: "2.20.0"}
    assert health.version("tensorflow") == "2.20.0"


def test_all_that_are_installed_are_named(install) -> None:
    install("tensorflow-cpu", "2.21.0")
    install("tensorflow", "2.20.0")
    assert distributions.installed_tensorflows() == {
        "tensorflow": "2.20.0",
        "tensorflow-cpu": "2.21.0",
    }
