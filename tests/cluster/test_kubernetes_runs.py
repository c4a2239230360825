"""The commands of pods, as processes with what Kubernetes and Kubeflow give them."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.manifests import documents, job_of
from tests.helpers import fresh_processes, runs
from tfgpipe.cluster.addresses import free_ports
from tfgpipe.cluster.errors import EX_TEMPFAIL
from tfgpipe_trainer.main import main

pytestmark = pytest.mark.nightly

PATIENCE = 300
SIZES = {"pipelining__num_stages": 2, "training__num_steps": 40}


def state(port: int) -> str:
    """Returns what a probe of the health port reads."""
    url = f"http://127.0.0.1:{port + 1}/healthz"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())["state"]


@contextlib.contextmanager
def pods(
    engine: str, ports: list[int], replicas: int, folder: Path
) -> Iterator[list[fresh_processes.Program]]:
    """Runs the commands of two pods, with addresses of this machine."""
    listed = [f"127.0.0.1:{port}" for port in ports]

    def of_pod(index: int) -> tuple[list[str], dict[str, str]]:
        """Returns flags and variables of a pod."""
        if engine == "TFJob":
            kind, own = ("chief", 0) if index == 0 else ("worker", index - 1)
            config = {
                "cluster": {"chief": listed[:1], "worker": listed[1:]},
                "task": {"type": kind, "index": own},
                "environment": "cloud",
            }
            return [], {"TF_CONFIG": json.dumps(config)}
        job = job_of(next(x for x in documents(engine) if x["kind"].startswith("Job")))
        command = job["spec"]["template"]["spec"]["containers"][0]["command"]
        kept = [each for each in command[3:] if each.startswith("--host")]
        text = "\n".join(kept).replace("$(JOB_COMPLETION_INDEX)", str(index))
        addresses = iter(listed)
        text = re.sub(r"[\w.-]+:4000", lambda _: next(addresses), text)
        return text.split("\n"), {}

    flags = runs.flags(**SIZES, pipelining__num_replicas=replicas)
    with contextlib.ExitStack() as stack:
        started = []
        for index in range(2):
            own, variables = of_pod(index)
            pod = fresh_processes.start(
                *("tests.trainer.slow_run", *flags, *own, f"--logdir={folder / 'two'}"),
                log=folder / f"log-{index}",
                TFGPIPE_TOKEN="of the secret",
                STEP_SECONDS="0.1",
                **variables,
            )
            started.append(stack.enter_context(pod))
        yield started


def check_as_one_process(replicas: int, folder: Path) -> None:
    """Compares the losses of pods with those of a run of this process."""
    one, two = folder / "one", folder / "two"
    flags = runs.flags(**SIZES, pipelining__num_replicas=replicas)
    assert main(["trainer", *flags, f"--logdir={one}"]) == 0
    assert [step for step, _ in runs.losses(two)] == [x for x, _ in runs.losses(one)]
    rtol = 0 if replicas == 1 else 2e-5
    for (_, was), (_, found) in zip(runs.losses(one), runs.losses(two), strict=True):
        assert found == pytest.approx(was, rel=rtol, abs=0)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("engine", ["job.yaml", "jobset.yaml", "TFJob"])
def test_pods_train_as_one_process(engine: str, replicas: int, tmp_path: Path) -> None:
    ports = free_ports(2)
    with pods(engine, ports, replicas, tmp_path) as started:
        runs.wait_for_step(tmp_path / "two", 3)
        # While they train: what the probes of the manifests ask for.
        expected = {"ready"} if replicas == 2 else {"taken"}
        assert {state(port) for port in ports} == expected
        assert [pod.wait(PATIENCE) for pod in started] == [0, 0]
    check_as_one_process(replicas, tmp_path)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_that_is_killed_is_made_anew_and_so_is_the_other(
    index: int, replicas: int, tmp_path: Path
) -> None:
    two, ports = tmp_path / "two", free_ports(2)
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(pods("job.yaml", ports, replicas, tmp_path))
        runs.wait_for_step(two, 5)
        with runs.timing_recovery(two, f"pod {index} killed, {replicas} replicas"):
            started[index].send_signal(signal.SIGKILL)
            # A status after which a Job makes another pod.
            assert started[1 - index].wait(PATIENCE) == EX_TEMPFAIL
            again = stack.enter_context(pods("job.yaml", ports, replicas, tmp_path))
        assert [pod.wait(PATIENCE) for pod in again] == [0, 0]
    check_as_one_process(replicas, tmp_path)
