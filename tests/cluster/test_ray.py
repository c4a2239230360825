"""A run in actors of a real Ray, one of which is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import runs
from tfgpipe.cluster.engines import run_on_ray
from tfgpipe_trainer.main import main

pytestmark = pytest.mark.nightly

ray = pytest.importorskip("ray")
PATIENCE = 300.0


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    os.environ["STEP_SECONDS"] = "0.3"
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    del os.environ["STEP_SECONDS"]


def actors() -> list[int]:
    """Returns the ids of the processes of actors, the oldest first."""
    found = subprocess.run(
        ["pgrep", "-f", "ray::_Process"], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_killed_actor_is_replaced_and_the_run_goes_on(
    replicas: int, local_ray: None, tmp_path: Path
) -> None:
    flags = runs.flags(
        pipelining__num_stages=2,
        pipelining__num_replicas=replicas,
        training__num_steps=30,
    )
    one, two = tmp_path / "one", tmp_path / "two"
    program = [sys.executable, "-m", "tests.trainer.slow_run", *flags]
    statuses: list[int] = []
    train = threading.Thread(
        target=lambda: statuses.append(
            run_on_ray([*program, f"--logdir={two}"], num_workers=2)
        )
    )
    train.start()
    runs.wait_for_step(two, 5)
    with runs.timing_recovery(two, f"actor killed, {replicas} replicas"):
        os.kill(actors()[-1], signal.SIGKILL)
    train.join(PATIENCE)
    assert statuses == [0]
    assert main(["trainer", *flags, f"--logdir={one}"]) == 0
    expected, received = runs.losses(one), runs.losses(two)
    assert [step for step, _ in received] == [step for step, _ in expected]
    np.testing.assert_allclose(
        [loss for _, loss in received],
        [loss for _, loss in expected],
        rtol=0 if replicas == 1 else 2e-5,
    )
    left = subprocess.run(["pgrep", "-f", str(two)], capture_output=True, check=False)
    assert not left.stdout


def test_a_command_that_fails_is_not_started_again(
    local_ray: None, tmp_path: Path
) -> None:
    count = f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); raise SystemExit(3)"
    assert run_on_ray([sys.executable, "-c", count], num_workers=2) == 3
    assert (tmp_path / "starts").read_text() == "xx"


@pytest.mark.parametrize(("command", "number"), [([], 1), (["true"], 0)])
def test_nothing_to_run_is_refused(command: list[str], number: int) -> None:
    with pytest.raises(ValueError, match=r"^Expected a command, and at least one"):
        run_on_ray(command, num_workers=number)
