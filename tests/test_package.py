"""The package as a user meets it: imported, installed, refused."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import py_compile
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools  # Before distutils, which it replaces.

import tfgpipe
from tests.helpers import fresh_processes
from tests.helpers.subprocesses import ROOT, interpret, python
from tfgpipe._compat.distributions import TENSORFLOWS

pytestmark = pytest.mark.pure

PACKAGES = ("tfgpipe", "tfgpipe_params", "tfgpipe_trainer")


def test_import_is_light_and_silent(tmp_path: Path) -> None:
    code = (
        "import sys, tfgpipe\n"
        "heavy = {'tensorflow', 'keras', 'numpy', 'absl'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {sorted(heavy)}' if heavy else 0)"
    )
    run = _python(code, cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_package_without_sources_has_all_its_names(tmp_path: Path) -> None:
    for path in (ROOT / "tfgpipe").rglob("*.py"):
        compiled = tmp_path / path.relative_to(ROOT).with_suffix(".pyc")
        py_compile.compile(str(path), str(compiled), doraise=True)
    code = (
        "import tfgpipe; print(tfgpipe.__file__, tfgpipe.Schedule.__module__, "
        "tfgpipe.schedules.__name__, *tfgpipe.__all__)"
    )
    run = _python(code, cwd=tmp_path)
    home = str(tmp_path / "tfgpipe" / "__init__.pyc")
    names = [home, "tfgpipe.schedules.schedule", "tfgpipe.schedules", *tfgpipe.__all__]
    assert (run.stdout.split(), run.stderr) == (names, "")


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


def test_without_tensorflow_the_import_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['tensorflow'] = None; import tfgpipe"
    wanted = _requirement("tensorflow")
    on_tpus = _requirement("tensorflow-tpu", TFGPIPE_TENSORFLOW="tensorflow-tpu")
    assert _refusal(_python(code, cwd=tmp_path)) == (
        "ImportError: tfgpipe needs TensorFlow, which is not installed in this "
        f"environment. Try `pip install '{wanted}'`; on a TPU VM `pip install "
        f"'{on_tpus}'`."
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="PipelinedLayers"):
        _ = tfgpipe.PipelinedLayers


@pytest.fixture(scope="module")
def distribution() -> setuptools.Distribution:
    return _run_setup()


def _run_setup(**variables: str) -> setuptools.Distribution:
    from distutils.core import run_setup

    with contextlib.chdir(ROOT), pytest.MonkeyPatch.context() as patch:
        patch.delenv("TFGPIPE_TENSORFLOW", raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        return run_setup("setup.py", stop_after="init")


def _requirement(name: str, **variables: str) -> str:
    """Returns what is required of a package, as `"keras>=3.14,<3.16"`."""
    required = _run_setup(**variables).install_requires
    (found,) = (each for each in required if re.split("[<>=]", each)[0] == name)
    # Sorted by setuptools.
    return name + ",".join(sorted(found.removeprefix(name).split(","), reverse=True))


def test_setup_takes_its_version_from_the_package(
    distribution: setuptools.Distribution,
) -> None:
    assert distribution.get_version() == tfgpipe.__version__
    assert f'"{tfgpipe.__version__}"' not in (ROOT / "setup.py").read_text("utf-8")


def test_every_folder_of_the_package_is_installed(
    distribution: setuptools.Distribution,
) -> None:
    """A wheel is built nightly."""
    folders = {path.parent for top in PACKAGES for path in (ROOT / top).rglob("*.py")}
    assert set(distribution.packages) == {
        ".".join(folder.relative_to(ROOT).parts) for folder in folders
    }


@pytest.mark.parametrize("tensorflow", TENSORFLOWS)
def test_one_tensorflow_is_required(tensorflow: str) -> None:
    """All distributions of it have the same files, so any other replaces them."""
    chosen = _run_setup(TFGPIPE_TENSORFLOW=tensorflow)
    extras = itertools.chain.from_iterable(chosen.extras_require.values())
    required = {
        re.split(r"[\[<>=;]", each)[0] for each in (*chosen.install_requires, *extras)
    }
    assert required & set(TENSORFLOWS) == {tensorflow}
    # Each of them requires `tensorflow`.
    others = {
        "keras-hub",
        "tensorflow-model-optimization",
        "tensorflow-text",
        "tf-keras",
    }
    assert tensorflow == "tensorflow" or not required & others


def test_libtpu_is_required_with_the_tensorflow_of_tpus_alone() -> None:
    assert _requirement("libtpu", TFGPIPE_TENSORFLOW="tensorflow-tpu")
    assert not any("libtpu" in each for each in _run_setup().install_requires)


def test_tensorflow_is_required_by_default() -> None:
    assert _requirement("tensorflow")
    assert _requirement("tensorflow", TFGPIPE_TENSORFLOW="")


def test_a_tensorflow_of_another_name_is_refused() -> None:
    run = python("setup.py", "--version", TFGPIPE_TENSORFLOW="tf-nightly")
    assert run.returncode == 1
    assert run.stderr.endswith(
        "TFGPIPE_TENSORFLOW names the TensorFlow that is required: expected one of "
        f"{', '.join(TENSORFLOWS)}; received 'tf-nightly'.\n"
    )


@pytest.mark.parametrize("package", ["keras", "tensorflow"])
def test_the_version_at_hand_is_in_the_range_that_is_tested(package: str) -> None:
    oldest, newest = re.findall(r"[\d.]+", _requirement(package))
    here = importlib.metadata.version(package)
    assert _numbers(oldest) <= _numbers(here) < _numbers(newest)
    # What `make test-keras` and `make test-tensorflow` install is the oldest.
    makefile = (ROOT / "Makefile").read_text("utf-8")
    installed = rf"^{package.upper()} \?= {re.escape(oldest)}\.\d+$"
    assert re.search(installed, makefile, re.MULTILINE)


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
    return interpret(
        code,
        cwd=cwd,
        without={"KERAS_BACKEND", "TF_USE_LEGACY_KERAS"},
        KERAS_HOME=str(cwd),
        **variables,
    )


# -- all of it loaded, and the wheel --------------------------------------------------


@pytest.mark.nightly
def test_no_module_loads_tfmot(tmp_path: Path) -> None:
    """Which sets TF_USE_LEGACY_KERAS for the process and its children."""
    code = (
        "import importlib, os, pkgutil, sys, tfgpipe\n"
        "for module in pkgutil.walk_packages(tfgpipe.__path__, 'tfgpipe.'):\n"
        "    importlib.import_module(module.name)\n"
        "assert 'tensorflow_model_optimization' not in sys.modules\n"
        "assert 'tf_keras' not in sys.modules\n"
        "assert 'TF_USE_LEGACY_KERAS' not in os.environ\n"
    )
    run = fresh_processes.run(code, cwd=tmp_path)
    assert run.returncode == 0, run.output


@pytest.mark.nightly
def test_the_planner_runs_from_the_wheel(tmp_path: Path) -> None:
    unpacked = _unpacked(tmp_path)
    (unpacked / "models.py").write_text(
        "import keras\n"
        "def dense():\n"
        "    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])\n"
    )
    asked = ["--model=models.dense", "--batch_size=8", "--device=h100-80g"]
    # What stands beside the package in a checkout is not there.
    code = (
        "import sys\n"
        "sys.modules.update(params=None, trainer=None, tests=None, benchmarks=None)\n"
        "from tfgpipe.planner import __main__ as program\n"
        f"assert program.__file__.startswith({str(unpacked)!r})\n"
        f"sys.exit(program.main(['planner', *{asked!r}, '--devices=2']))\n"
    )
    printed = _printed_from(code, cwd=tmp_path, path=unpacked)
    assert printed.startswith("models.dense on 2 x h100-80g: 72 parameters")


def _printed_from(code: str, *, cwd: Path, path: Path) -> str:
    """Returns what a program prints that takes its packages from a folder."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def _unpacked(tmp_path: Path) -> Path:
    """Returns a folder with what a wheel installs."""
    wheel, _ = _built(tmp_path)
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    return tmp_path / "unpacked"


def _built(tmp_path: Path) -> tuple[Path, Path]:
    """Returns a wheel, and the checkout that it was built from."""
    # From a copy: setuptools leaves folders behind, and reuses stale ones.
    checkout = tmp_path / "checkout"
    caches = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "runs"
    )
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=caches)
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
    return wheel, checkout


@pytest.mark.nightly
def test_the_wheel_holds_exactly_the_package(tmp_path: Path) -> None:
    wheel, checkout = _built(tmp_path)
    held = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in held if ".dist-info/" in name}
    package = {
        path.relative_to(checkout).as_posix()
        for top in PACKAGES
        for path in (checkout / top).rglob("*")
        if path.is_file()
    }
    assert held - metadata == package
    assert {Path(name).name for name in metadata} == {
        "LICENSE",
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "top_level.txt",
    }
    (top_level,) = (name for name in metadata if name.endswith("top_level.txt"))
    assert zipfile.ZipFile(wheel).read(top_level).decode().split() == sorted(PACKAGES)


@pytest.mark.nightly
def test_the_trainer_runs_from_the_wheel(tmp_path: Path) -> None:
    """A class of one's own in a folder of one's own, beside others' `trainer`."""
    unpacked = _unpacked(tmp_path)
    folder = tmp_path / "mine"
    for other in ("trainer", "params"):
        (folder / other).mkdir(parents=True)
        (folder / other / "__init__.py").write_text("raise SystemExit('not this one')")

    def run(*flags: str) -> str:
        command = (
            "import sys\n"
            f"sys.argv, _ = ['/bin/tfgpipe-train', *{flags!r}], sys.path.pop(0)\n"
            "from tfgpipe_trainer.main import command\ncommand()"
        )
        return _printed_from(command, cwd=folder, path=unpacked)

    assert "tfgpipe-train --params=lm.Tiny" in run()
    (folder / "mine.py").write_text(run("--mode=template"), "utf-8")
    short = ["--set=training.num_steps=4", "--set=evaluation.every_steps=2"]
    assert "step 4: validation loss" in run("--params=mine.Mine", *short)
    assert (folder / "runs" / "mine.Mine" / "params.txt").is_file()
