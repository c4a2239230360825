"""One classifier, spread over devices in several ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import experiments
from trainer.main import main


def test_spread_in_all_ways_at_once_it_learns_the_same() -> None:
    experiments.check_that_it_learns_as_alone("parallelism.AllThree")


def test_inspecting_draws_who_holds_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        f"--set={name}={value}" for name, value in experiments.CLASSIFIER.items()
    ]
    argv = ["trainer", "--params=parallelism.PipelinedDataParallel", "--mode=inspect"]
    assert main([*argv, *settings, f"--logdir={tmp_path / 'run'}"]) == 0
    assert "mesh.png" in capsys.readouterr().out
    assert (tmp_path / "run" / "mesh.png").stat().st_size > 1000
