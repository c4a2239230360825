"""The package as a user meets it: imported, installed, refused."""

from __future__ import annotations

import importlib.metadata
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tfgpipe

ROOT = Path(__file__).resolve().parents[1]
# Importing TensorFlow Model Optimization sets TF_USE_LEGACY_KERAS for the process and
# its children, so only the rooms that need it may load it.
ROOMS_USING_TFMOT: frozenset[str] = frozenset()


def test_import_is_light_and_silent(tmp_path: Path) -> None:
    code = (
        "import sys, tfgpipe\n"
        "heavy = {'tensorflow', 'keras', 'numpy', 'absl'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {sorted(heavy)}' if heavy else 0)"
    )
    run = _python(code, cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_another_keras_backend_is_refused_in_a_sentence(tmp_path: Path) -> None:
    run = _python("import tfgpipe", cwd=tmp_path, KERAS_BACKEND="jax")
    assert _refusal(run) == (
        "ImportError: tfgpipe needs Keras to run on TensorFlow, but KERAS_BACKEND is "
        "'jax'. Set KERAS_BACKEND=tensorflow in the environment before Python starts."
    )


def test_a_backend_in_the_settings_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    run = _python("import tfgpipe", cwd=tmp_path)
    assert "keras.json names 'jax'" in _refusal(run)


def test_a_keras_imported_with_another_backend_is_refused(tmp_path: Path) -> None:
    # A stand-in: other backends are not installed here.
    code = (
        "import sys, types\n"
        "keras = sys.modules['keras'] = types.ModuleType('keras')\n"
        "keras.config = types.SimpleNamespace(backend=lambda: 'torch')\n"
        "import tfgpipe"
    )
    run = _python(code, cwd=tmp_path, KERAS_BACKEND="tensorflow")
    assert "Keras was imported with 'torch'" in _refusal(run)


def test_the_tensorflow_backend_is_accepted(tmp_path: Path) -> None:
    run = _python("import tfgpipe", cwd=tmp_path, KERAS_BACKEND="tensorflow")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", tfgpipe.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(tfgpipe, name).__doc__
    assert name in dir(tfgpipe)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="PipelinedLayers"):
        _ = tfgpipe.PipelinedLayers


def test_only_rooms_that_use_tfmot_load_it(tmp_path: Path) -> None:
    rooms = [
        room.name
        for room in pkgutil.walk_packages(tfgpipe.__path__, "tfgpipe.")
        if room.name not in ROOMS_USING_TFMOT
    ]
    code = (
        "import importlib, os, sys\n"
        f"for room in {rooms}:\n"
        "    importlib.import_module(room)\n"
        "assert 'tensorflow_model_optimization' not in sys.modules\n"
        "assert 'tf_keras' not in sys.modules\n"
        "assert 'TF_USE_LEGACY_KERAS' not in os.environ\n"
    )
    run = _python(code, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_the_wheel_holds_exactly_the_package(tmp_path: Path) -> None:
    # From a copy: setuptools leaves folders behind, and reuses stale ones.
    checkout = tmp_path / "checkout"
    caches = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "runs"
    )
    shutil.copytree(ROOT, checkout, ignore=caches)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    run = subprocess.run(
        [*pip, *offline, f"--wheel-dir={tmp_path}", str(checkout)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr

    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in held if ".dist-info/" in name}
    package = {
        path.relative_to(checkout).as_posix()
        for path in (checkout / "tfgpipe").rglob("*")
        if path.is_file()
    }
    assert held - metadata == package
    assert {Path(name).name for name in metadata} == {
        "LICENSE",
        "METADATA",
        "RECORD",
        "WHEEL",
        "top_level.txt",
    }
    (top_level,) = (name for name in metadata if name.endswith("top_level.txt"))
    assert zipfile.ZipFile(wheel).read(top_level).decode().split() == ["tfgpipe"]


def test_setup_takes_its_version_from_the_package() -> None:
    run = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split()[-1] == tfgpipe.__version__
    assert f'"{tfgpipe.__version__}"' not in (ROOT / "setup.py").read_text("utf-8")


def test_the_keras_at_hand_is_in_the_range_that_is_tested() -> None:
    setup = (ROOT / "setup.py").read_text("utf-8")
    oldest, newest = re.search(r'"keras>=([\d.]+),<([\d.]+)"', setup).groups()
    here = importlib.metadata.version("keras")
    assert _numbers(oldest) <= _numbers(here) < _numbers(newest)
    # What `make test-keras` installs by itself is the oldest.
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(rf"^KERAS \?= {re.escape(oldest)}\.\d+$", makefile, re.MULTILINE)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def _refusal(run: subprocess.CompletedProcess[str]) -> str:
    """Returns the last line of a run that failed."""
    assert run.returncode == 1
    return run.stderr.strip().splitlines()[-1]


def _python(
    code: str, *, cwd: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter; `variables` are its only Keras settings."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in {"KERAS_BACKEND", "TF_USE_LEGACY_KERAS"}
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={
            **inherited,
            "PYTHONPATH": str(ROOT),
            "KERAS_HOME": str(cwd),
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
    )
