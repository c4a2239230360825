"""The check of accelerators on logical CPUs: all that can be checked there, passes."""

from __future__ import annotations

import re
import subprocess
import sys

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
