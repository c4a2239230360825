"""The check of accelerators on logical CPUs: all that can be checked there, passes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from benchmarks.accelerator_check.__main__ import ROOT
from benchmarks.accelerator_check.report import PARTS

NOT_RUN = (
    "NCCL: it sums over GPUs",
    "lm.Small: it needs accelerators",
    "memory: TensorFlow counts that of GPUs alone",
    "operations on the host: the devices are the host's",
    "overlap of copies and computation: no GPU",
)


def test_all_that_cpus_can_show_passes_and_the_rest_is_named(tmp_path):
    command = [sys.executable, "-m", "benchmarks.accelerator_check", "--quick"]
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


def test_functions_are_exported_and_jax_gives_the_same_for_them(tmp_path):
    folder = tmp_path / "exported"
    command = [sys.executable, "-m", "benchmarks.accelerator_check", "--quick"]
    run = subprocess.run(
        [*command, f"--export={folder}"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    number = len(list(folder.glob("*.mlir.gz")))
    assert number == len(list(folder.glob("*.npz"))) > 60
    assert f"{number} functions, " in run.stdout
    assert sum(path.stat().st_size for path in folder.iterdir()) < 40 * 2**20
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed: exported functions are not run.")
    ran = subprocess.run(
        [sys.executable, folder / "run_exported.py", folder, "--repeats=1"],
        cwd=folder,  # It needs nothing of the checkout.
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    report = (folder / "report-cpu.md").read_text("utf-8")
    assert f"{number} functions, 0 failed." in report
