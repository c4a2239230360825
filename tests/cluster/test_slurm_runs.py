"""Runs under a real Slurm: each form of a run, preempted, drained and cancelled."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cluster import slurm as slurms
from tests.cluster.slurm import Slurm
from tests.helpers import runs
from tests.helpers.subprocesses import ROOT
from tfgpipe_trainer.main import main

PATIENCE = 240.0
STAGES = {"pipelining__num_stages": 2, "training__num_steps": 30}
REPLICAS = {**STAGES, "pipelining__num_replicas": 2}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not slurms.is_installed(), reason="needs Debian's slurm-wlm and munge"
    ),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurms.running(tmp_path_factory.mktemp("slurm") / "own") as found:
        yield found


def script(name: str, folder: Path, *, module: str = "trainer") -> str:
    """Returns the file of an example, for the Python and the module of this test."""
    text = (ROOT / "examples" / "slurm" / name).read_text()
    assert text.count("python -m trainer") >= 1
    changed = text.replace("python -m trainer --", f"{sys.executable} -m {module} --")
    path = folder / name
    path.write_text(changed)
    return str(path)


def same(one: Path, other: Path, *, rtol: float, but: str = "") -> None:
    """Compares all losses and measurements of two runs, but one by its name."""
    expected, received = (
        [{name: x for name, x in record.items() if name != but} for record in records]
        for records in (runs.timeless(one), runs.timeless(other))
    )
    assert [r.keys() for r in received] == [r.keys() for r in expected]
    for was, found in zip(expected, received, strict=True):
        np.testing.assert_allclose([*found.values()], [*was.values()], rtol=rtol)


def trained_here(tmp_path: Path, **changes: object) -> Path:
    assert (
        main(["trainer", *runs.flags(**changes), f"--logdir={tmp_path / 'one'}"]) == 0
    )
    return tmp_path / "one"


def left(folder: Path) -> str:
    """Returns the processes of a run that are there."""
    found = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True)
    return "".join(
        line
        for line in found.stdout.splitlines(keepends=True)
        if str(folder) in line or "tfgpipe.cluster worker" in line
    )


def started(
    slurm: Slurm, tmp_path: Path, *options: str, **changes: int
) -> tuple[str, Path, Path]:
    """Submits a slow run; returns its job, and the paths of its folder and its log."""
    slurm.environment["STEP_SECONDS"] = "0.3"
    two, log = tmp_path / "two", tmp_path / "log"
    job = slurm.submit(
        *options,
        f"--output={log}",
        script("train.sbatch", tmp_path, module="tests.trainer.slow_run"),
        *runs.flags(**(changes or STAGES)),
        f"--logdir={two}",
    )
    return job, two, log


def wait_until_empty(slurm: Slurm) -> None:
    deadline = time.monotonic() + PATIENCE
    while said := slurm.call("squeue", "--noheader").strip():
        assert time.monotonic() < deadline, said
        time.sleep(0.5)


def again(slurm: Slurm, job: str) -> None:
    """Waits until a job is put back, and has it started without delay."""
    slurm.wait(job, ["PENDING"], PATIENCE)
    slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")


@pytest.mark.parametrize(
    ("changes", "tasks", "rtol"),
    [(STAGES, 2, 0), (REPLICAS, 2, 2e-5), (REPLICAS, 4, 2e-5)],
    ids=["stages", "replicas", "replicas of stages"],
)
def test_a_run_of_each_form_is_that_of_one_process(
    changes: dict[str, int], tasks: int, rtol: float, slurm: Slurm, tmp_path: Path
) -> None:
    log, two = tmp_path / "log", tmp_path / "two"
    command = [sys.executable, "-m", "trainer", *runs.flags(**changes)]
    process = slurm.start(
        *("srun", "-N2", f"-n{tasks}", *command, "--cluster=slurm"),
        f"--logdir={two}",
        log=log,
    )
    assert process.wait(PATIENCE) == 0, log.read_text()
    same(trained_here(tmp_path, **changes), two, rtol=rtol)
    assert not left(two)


@pytest.mark.parametrize("tasks", [2, 4])
def test_a_job_that_is_put_back_goes_on(
    tasks: int, slurm: Slurm, tmp_path: Path
) -> None:
    changes = STAGES if tasks == 2 else REPLICAS
    each = f"--ntasks-per-node={tasks // 2}"
    job, two, log = started(slurm, tmp_path, f"--ntasks={tasks}", each, **changes)
    runs.wait_for_step(two, 5, seconds=PATIENCE)
    with runs.timing_recovery(two, f"scontrol requeue of {tasks} processes"):
        slurm.call("scontrol", "requeue", job)
        again(slurm, job)
    slurm.wait(job, ["COMPLETED"], PATIENCE)
    assert "Going on from step" in log.read_text()
    same(trained_here(tmp_path, **changes), two, rtol=0 if tasks == 2 else 2e-5)
    assert not left(two)


def test_a_drained_node_ends_a_run_that_goes_on_when_it_is_back(
    slurm: Slurm, tmp_path: Path
) -> None:
    job, two, log = started(slurm, tmp_path)
    runs.wait_for_step(two, 5, seconds=PATIENCE)
    with runs.timing_recovery(two, "node drained, SIGTERM, node back"):
        slurm.call("scontrol", "update", "nodename=n1", "state=drain", "reason=test")
        # What the time limit does as well: steps get it, and the script puts it back.
        slurm.call("scancel", "--signal=TERM", job)
        slurm.wait(job, ["PENDING"], PATIENCE)
        assert "Stopped, with all saved" in log.read_text()
        slurm.call("scontrol", "update", "nodename=n1", "state=resume")
        again(slurm, job)
    slurm.wait(job, ["COMPLETED"], PATIENCE)
    same(trained_here(tmp_path, **STAGES), two, rtol=0)
    assert not left(two)


@pytest.mark.parametrize("changes", [STAGES, REPLICAS], ids=["stages", "replicas"])
def test_a_run_goes_on_with_the_nodes_that_are_left_and_returns_to_all(
    changes: dict[str, int], slurm: Slurm, tmp_path: Path
) -> None:
    slurm.environment |= {"STEP_SECONDS": "0.4", "LIMIT": "2", "EVERY": "15"}
    two, log = tmp_path / "two", tmp_path / "log"
    flags = runs.flags(**{**changes, "training__num_steps": 60})
    elastic = script("elastic.sbatch", tmp_path, module="tests.trainer.slow_run")
    text = Path(elastic).read_text()
    assert "=%x.log\n" in text  # Of the job that it submits as well.
    Path(elastic).write_text(text.replace("=%x.log\n", f"={log}\n"))
    slurm.submit(
        elastic,
        *flags,
        f"--logdir={two}",
    )
    runs.wait_for_step(two, 5, seconds=PATIENCE)
    with runs.timing_recovery(two, "node drained, on with the other"):
        slurm.call("scontrol", "update", "nodename=n1", "state=drain", "reason=test")
        # As its health check may do as well.
        slurm.call("scancel", "--signal=TERM", "--name=elastic")
    reached = max(step for step, _ in runs.losses(two))
    runs.wait_for_step(two, reached + 5, seconds=PATIENCE)
    assert slurm.call("squeue", "--noheader", "--format=%D").split() == ["1"]
    slurm.call("scontrol", "update", "nodename=n1", "state=resume")
    runs.wait_for_step(two, 60, seconds=PATIENCE)
    wait_until_empty(slurm)
    said = log.read_text()
    less = "num_stages" if changes is STAGES else "num_replicas"
    assert said.count(f"1 of 2 hosts are here: pipelining.{less}=1.") == 1
    assert said.count("Going on from step") == 2
    assert main(["trainer", *flags, f"--logdir={tmp_path / 'one'}"]) == 0
    # One stage alone has no bubble.
    same(tmp_path / "one", two, rtol=2e-5, but="bubble")
    assert not left(two)


def test_nothing_is_left_of_a_job_that_is_cancelled(
    slurm: Slurm, tmp_path: Path
) -> None:
    job, two, _ = started(slurm, tmp_path)
    runs.wait_for_step(two, 3, seconds=PATIENCE)
    slurm.call("scancel", job)
    slurm.wait(job, ["CANCELLED"], PATIENCE)
    deadline = time.monotonic() + 60
    while left(two):
        assert time.monotonic() < deadline, left(two)
        time.sleep(0.2)
    assert slurm.field(job, "JobState") == "CANCELLED"


def test_an_array_is_a_sweep(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    slurm.submit(
        "--array=0-1",
        f"--output={tmp_path / 'log'}",
        script("sweep.sbatch", tmp_path),
        *runs.flags(training__num_steps=4),
        f"--logdir={folder}",
        "--sweep=seed=1,2",
    )
    wait_until_empty(slurm)
    assert [len(runs.losses(folder / f"seed={i}")) for i in (1, 2)] == [4, 4]
