"""Roles of processes by `TF_CONFIG`, as its writers write it."""

from __future__ import annotations

import json

import pytest

from tfgpipe.cluster.engines import roles
from tfgpipe.cluster.engines.roles import Role

pytestmark = pytest.mark.pure

WORKERS = {"worker": ["a:4000", "b:4000"]}


def from_config(cluster: object, **task: object) -> Role | None:
    return roles.from_tf_config(json.dumps({"cluster": cluster, "task": task}))


def test_workers_are_in_their_order() -> None:
    found = from_config(WORKERS, type="worker", index=1)
    assert found == Role(("a:4000", "b:4000"), 1)
    assert roles.from_tf_config(found.tf_config) == found


@pytest.mark.parametrize(
    ("task", "index"),
    [({"type": "chief", "index": 0}, 0), ({"type": "worker", "index": "1"}, 2)],
)
def test_a_chief_of_kubeflow_or_vertex_is_the_first(task: dict, index: int) -> None:
    """As Kubeflow's training operator and Vertex AI write it."""
    config = {
        "cluster": {
            "chief": ["train-chief-0.default.svc:2222"],
            "worker": [f"train-worker-{i}.default.svc:2222" for i in (0, 1)],
        },
        "task": {**task, "trial": "", "cloud": ""},
        "environment": "cloud",
    }
    found = roles.tf_config_role({"TF_CONFIG": json.dumps(config)})
    assert found is not None
    assert found.index == index
    assert found.workers[0].startswith("train-chief-0.")
    assert found.workers[2].startswith("train-worker-1.")


@pytest.mark.parametrize("cluster", [{}, {"worker": ["a:4000"]}, {"chief": ["a:4000"]}])
def test_one_process_is_alone(cluster: dict) -> None:
    assert from_config(cluster, type="worker", index=0) is None
    assert roles.tf_config_role({}) is None


@pytest.mark.parametrize(
    ("cluster", "task", "words"),
    [
        (WORKERS, {"type": "worker", "index": 2}, "its task is"),
        (WORKERS, {"type": "worker", "index": 1.9}, "its task is"),
        (WORKERS, {"type": "chief", "index": 0}, "its task is"),
        ({**WORKERS, "ps": ["c:1"]}, {"type": "worker", "index": 0}, "worker and ps"),
        ({"worker": [1, 2]}, {"type": "worker", "index": 0}, "lists of addresses"),
        ({"worker": ["a", "b"]}, {"type": "worker", "index": 0}, "'a'"),
    ],
)
def test_anything_else_is_refused(cluster: dict, task: dict, words: str) -> None:
    with pytest.raises(ValueError, match=r"^Expected TF_CONFIG") as error:
        from_config(cluster, **task)
    assert words in str(error.value)
