"""The check of accelerators on logical CPUs: all that can be checked there, passes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from tests.accelerator_check.__main__ import ROOT
from tests.accelerator_check.report import PARTS

NOT_RUN = (
    "NCCL: it sums over GPUs",
    "lm.Small: it needs accelerators",
    "memory: TensorFlow counts that of GPUs alone",
    "operations on the host: the devices are the host's",
    "overlap of copies and computation: no GPU",
)


def test_all_that_cpus_can_show_passes_and_the_rest_is_named(tmp_path):
    command = [sys.executable, "-m", "tests.accelerator_check", "--quick"]
    run = subprocess.run(
        [*command, f"--folder={tmp_path}"], cwd=ROOT, capture_output=True, text=True
    )
    text = (tmp_path / "report.md").read_text("utf-8")
    assert run.returncode == 0, text
    assert f"{len(PARTS)} passed, 0 failed, 0 not run" in text
    for what in NOT_RUN:
        assert f"Not run: {what}" in text
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    # Every value of each factor, with the differences of the case.
    for value in ("gpipe", "1f1b", "interleaved", "zero_bubble", "mixed_bfloat16"):
        assert re.search(rf"\| {value} \|.*\| 0\.\d+ \|", text), value


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check") / "exported"
    command = [sys.executable, "-m", "tests.accelerator_check", "--quick"]
    run = subprocess.run(
        [*command, f"--export={folder}"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return folder


def test_functions_are_exported(exported):
    number = len(list(exported.glob("*.mlir.gz")))
    assert number == len(list(exported.glob("*.npz"))) > 60
    assert sum(path.stat().st_size for path in exported.iterdir()) < 40 * 2**20


@pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX is not installed."
)
def test_jax_gives_the_same_for_exported_functions(exported):
    run = subprocess.run(
        [sys.executable, exported / "run_exported.py", exported, "--repeats=1"],
        cwd=exported,  # It needs nothing of the checkout.
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert " functions, 0 failed." in (exported / "report-cpu.md").read_text("utf-8")


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "kept").write_text("text")
    command = [sys.executable, "-m", "tests.accelerator_check"]
    run = subprocess.run(
        [*command, f"--export={tmp_path}"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "Expected a new folder, or one of an export" in run.stderr
    assert (tmp_path / "kept").read_text() == "text"
