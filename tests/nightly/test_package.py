"""The package as it is built, and all of it loaded."""

from __future__ import annotations

import os
import pkgutil
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import tfgpipe
from tests.helpers import fresh_processes
from tests.helpers.subprocesses import ROOT

# Of the wheel.
PACKAGES = ("tfgpipe", "tfgpipe_params", "tfgpipe_trainer")
# Importing TensorFlow Model Optimization sets TF_USE_LEGACY_KERAS for the process and
# its children, so only the modules that need it may load it.
MODULES_USING_TFMOT: frozenset[str] = frozenset()


def test_only_modules_that_use_tfmot_load_it(tmp_path: Path) -> None:
    modules = [
        module.name
        for module in pkgutil.walk_packages(tfgpipe.__path__, "tfgpipe.")
        if module.name not in MODULES_USING_TFMOT
    ]
    code = (
        "import importlib, os, sys\n"
        f"for module in {modules}:\n"
        "    importlib.import_module(module)\n"
        "assert 'tensorflow_model_optimization' not in sys.modules\n"
        "assert 'tf_keras' not in sys.modules\n"
        "assert 'TF_USE_LEGACY_KERAS' not in os.environ\n"
    )
    run = fresh_processes.run(code, cwd=tmp_path)
    assert run.returncode == 0, run.output


def test_the_planner_runs_from_the_wheel(tmp_path: Path) -> None:
    wheel, _ = _built(tmp_path)
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
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
    printed = _printed(code, cwd=tmp_path, path=unpacked)
    assert printed.startswith("models.dense on 2 x h100-80g: 72 parameters")


def _printed(code: str, *, cwd: Path, path: Path) -> str:
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


def test_the_trainer_runs_from_the_wheel(tmp_path: Path) -> None:
    """A class of one's own in a folder of one's own, beside others' `trainer`."""
    wheel, _ = _built(tmp_path)
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
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
        return _printed(command, cwd=folder, path=unpacked)

    assert "tfgpipe-train --params=lm.Tiny" in run()
    (folder / "mine.py").write_text(run("--mode=template"), "utf-8")
    short = ["--set=training.num_steps=4", "--set=evaluation.every_steps=2"]
    assert "step 4: validation loss" in run("--params=mine.Mine", *short)
    assert (folder / "runs" / "mine.Mine" / "params.txt").is_file()
