"""The manifests of Kubernetes in the examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.subprocesses import ROOT

FOLDER = ROOT / "examples" / "kubernetes"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def jobset_schema() -> dict[str, Any]:
    """Returns the schema of JobSets, which says of itself whence it is."""
    path = Path(__file__).with_name("jobset-v1alpha2.json")
    return json.loads(path.read_text("utf-8"))


def job_of(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the job that a manifest has, or that a JobSet makes."""
    if document["kind"] == "Job":
        return document
    (replicated,) = document["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    name = f"{document['metadata']['name']}-{replicated['name']}-0"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        **replicated["template"],
    }
