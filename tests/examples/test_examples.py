"""Examples print what they promise."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.examples import (
    EXAMPLES,
    FOLDER,
    assert_ends_like,
    assert_prints_what_it_promises,
    indented_blocks,
)
from tests.helpers.marks import nightly
from tests.helpers.subprocesses import ROOT

SLOW = {
    *("efficientnet", "experts_and_slices", "gpt2_lora", "split_vocabulary"),
    "dp_pp_tp",
}
QUICK = sorted(EXAMPLES.keys() - SLOW - {"multi_host"})
PICTURES = {"own_schedule": "schedule.png", "unet": "unet.png"}


@pytest.mark.parametrize("name", nightly(sorted(SLOW), gate=QUICK))
def test_an_example_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    assert_prints_what_it_promises(name, tmp_path)
    if name in PICTURES:
        assert (tmp_path / PICTURES[name]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_two_hosts_go_on_after_a_kill(tmp_path: Path) -> None:
    """Runs the command as it is in the docstring."""
    ((command,), promised, *_) = indented_blocks("multi_host")
    words = shlex.split(command.replace("examples/", f"{FOLDER}/"))
    run = subprocess.run(
        [sys.executable if word == "python" else word for word in words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "ended by SIGKILL: starting it again" in run.stderr
    assert_ends_like(promised, run.stdout)
