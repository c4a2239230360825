"""The commands of pods, as processes with what Kubernetes and Kubeflow give them."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from pathlib import Path

import pytest

from tests.cluster.manifests import documents, job_of
from tests.helpers import fresh_processes
from tests.trainer import runs
from tfgpipe.cluster.addresses import free_ports
from tfgpipe_trainer.main import main

SIZES = {"pipelining__num_stages": 2, "training__num_steps": 40}


def state(port: int) -> str:
    """Returns what a probe of the health port reads."""
    url = f"http://127.0.0.1:{port + 1}/healthz"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())["state"]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("engine", ["job.yaml", "jobset.yaml", "TFJob"])
def test_pods_train_as_one_process(engine: str, replicas: int, tmp_path: Path) -> None:
    flags = runs.flags(**SIZES, pipelining__num_replicas=replicas)
    one, two = tmp_path / "one", tmp_path / "two"
    ports = free_ports(2)
    listed = [f"127.0.0.1:{port}" for port in ports]

    def of_pod(index: int) -> tuple[list[str], dict[str, str]]:
        """Returns flags and variables of a pod, with addresses of this machine."""
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

    with contextlib.ExitStack() as stack:
        started = []
        for index in range(2):
            own, variables = of_pod(index)
            pod = fresh_processes.start(
                *("tests.trainer.slow_run", *flags, *own, f"--logdir={two}"),
                log=tmp_path / f"log-{index}",
                TFGPIPE_TOKEN="of the secret",
                STEP_SECONDS="0.1",
                **variables,
            )
            started.append(stack.enter_context(pod))
        runs.wait_for_step(two, 3)
        # While they train: what the probes of the manifests ask for.
        expected = {"ready"} if replicas == 2 else {"taken"}
        assert {state(port) for port in ports} == expected
        assert [pod.wait(300) for pod in started] == [0, 0]
    assert main(["trainer", *flags, f"--logdir={one}"]) == 0
    assert [step for step, _ in runs.losses(two)] == [x for x, _ in runs.losses(one)]
    rtol = 0 if replicas == 1 else 2e-5
    for (_, was), (_, found) in zip(runs.losses(one), runs.losses(two), strict=True):
        assert found == pytest.approx(was, rel=rtol, abs=0)
