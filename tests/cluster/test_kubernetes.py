"""The manifests of Kubernetes: valid, and with commands that are those of processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.manifests import documents, job_of, jobset_schema
from tfgpipe.cluster.engines.roles import Role
from tfgpipe_trainer import flags, hosts

pytestmark = pytest.mark.pure

# The oldest and the newest that the validator has of those still supported.
VERSIONS = ("1.30", "1.33")


def jobs() -> list[Any]:
    found = [documents("job.yaml")[1], documents("jobset.yaml")[0]]
    return [pytest.param(job_of(x), id=x["kind"]) for x in found]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_manifests_fit_their_schema(name: str, version: str) -> None:
    """Those of Kubernetes itself; of a JobSet its own, and of the job that it makes."""
    validator = pytest.importorskip("kubernetes_validate")
    jsonschema = pytest.importorskip("jsonschema")
    for document in documents(name):
        if document["kind"] == "JobSet":
            jsonschema.validate(document, jobset_schema())
            document = job_of(document)
        validator.validate(document, version, strict=True)


@pytest.mark.parametrize(
    "wrong",
    [{"sucessPolicy": {}}, {"failurePolicy": {"maxRestarts": "many"}}],
    ids=["unknown field", "wrong type"],
)
def test_a_wrong_jobset_does_not_fit_its_schema(wrong: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = documents("jobset.yaml")[0]
    document["spec"] |= wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, jobset_schema())


@pytest.mark.parametrize("job", jobs())
def test_each_pod_finds_its_role(job: dict[str, Any], monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name, number = job["metadata"]["name"], spec["completions"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == number
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    for index in range(number):
        # As the kubelet does with what the job's controller sets.
        command = [
            each.replace("$(JOB_COMPLETION_INDEX)", str(index))
            for each in container["command"]
        ]
        read = flags.parse(command[2:])
        role = hosts.find_role(read.hosts, read.host_index)
        # A pod's own name, and that of its service.
        workers = tuple(f"{name}-{i}.train:{ports['tensors']}" for i in range(number))
        assert role == Role(workers, index)
        found = hosts.of_role(role, read.experiment().pipelining)
        assert found.is_client == (index == 0)
    assert ports["health"] == ports["tensors"] + 1


@pytest.mark.parametrize("job", jobs())
def test_pods_that_would_fail_again_are_not_restarted(job: dict[str, Any]) -> None:
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    statuses = {line.split()[0] for line in flags.HELP.splitlines()[-4:]}
    assert rule["onExitCodes"]["values"] == [1, 2, 3]
    assert "1" in statuses or "2" in statuses


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_ports_are_open_to_the_job_alone(name: str) -> None:
    (policy,) = (x for x in documents(name) if x["kind"] == "NetworkPolicy")
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    (rule,) = policy["spec"]["ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": chosen}}]}
    (job,) = (job_of(x) for x in documents(name) if x["kind"] in ("Job", "JobSet"))
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert labels.items() >= chosen.items()
