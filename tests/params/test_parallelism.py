"""One classifier, spread over devices in several ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import experiments
from tests.helpers.marks import nightly
from tfgpipe_trainer.experiment import experiments as experiments_here
from tfgpipe_trainer.experiment import find
from tfgpipe_trainer.main import main


@pytest.mark.parametrize(
    ("name", "spread"),
    [
        ("SingleDevice", (1, 1, 1)),
        ("DataParallel", (2, 1, 1)),
        ("Pipelined", (1, 2, 1)),
        ("PipelinedDataParallel", (2, 2, 1)),
        ("TensorParallel", (1, 1, 2)),
        ("TensorParallelRing", (1, 1, 2)),
        ("DataPipelineTensor", (2, 2, 2)),
    ],
)
def test_an_experiment_has_the_replicas_stages_and_shards_that_it_says(
    name: str, spread: tuple[int, int, int]
) -> None:
    pipelining = find(f"parallelism.{name}")().pipelining
    assert (
        pipelining.num_replicas,
        pipelining.num_stages,
        pipelining.num_shards,
    ) == spread


SPREAD = [name for name in experiments_here() if name.startswith("parallelism.")]
SPREAD.remove("parallelism.SingleDevice")


@pytest.mark.parametrize(
    "name", nightly(SPREAD, gate=["parallelism.DataPipelineTensor"])
)
def test_spread_in_any_way_it_learns_the_same(name: str) -> None:
    """In all ways at once, or in one."""
    experiments.check_that_it_learns_as_alone(name)


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
