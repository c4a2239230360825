"""A run in a remote folder that is killed again and again, each time elsewhere."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import s3fs

from tests.helpers import fresh_processes, runs, s3
from tfgpipe_trainer.main import main

pytestmark = pytest.mark.nightly

URL = "s3://kills/mine"


def test_a_remote_run_killed_ten_times_measures_what_one_in_peace_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = runs.flags(training__num_steps=48)
    assert main(["trainer", *flags, f"--logdir={tmp_path / 'whole'}"]) == 0
    chance = random.Random(1)
    with s3.served() as port:
        there = s3.variables(port)
        for name, value in there.items():
            monkeypatch.setenv(name, value)
        files: Any = s3fs.S3FileSystem(use_listings_cache=False)
        files.mkdir("kills")
        last = 0
        for number in range(10):
            log = tmp_path / f"log{number}"
            with fresh_processes.start(
                "tests.trainer.slow_run",
                *flags,
                f"--logdir={URL}",
                log=log,
                XDG_CACHE_HOME=str(tmp_path / str(number)),
                STEP_SECONDS="0.4",
                **there,
            ) as trainer:
                deadline = time.monotonic() + 120
                while (step := _newest(files)) <= last:
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.02)
                time.sleep(chance.uniform(0, 0.5))
                trainer.send_signal(signal.SIGKILL)
            last = step
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "last"))
        assert main(["trainer", *flags, f"--logdir={URL}"]) == 0
        text = files.cat_file("kills/mine/metrics.jsonl").decode()
    assert runs.timeless_records(text) == runs.timeless(tmp_path / "whole")


def _newest(files: Any) -> int:
    """Returns the step of the last whole checkpoint."""
    found = [x for x in files.find("kills/mine") if x.endswith("/complete.json")]
    return max((int(path.split("-")[-1].split("/")[0]) for path in found), default=0)
