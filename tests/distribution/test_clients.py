"""Strategies in a process that is one client of several."""

from __future__ import annotations

import types
from typing import Any

import keras
import pytest

import tfgpipe
from tfgpipe import cluster


@pytest.fixture(autouse=True)
def _connected(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = types.SimpleNamespace(num_replicas=2, replica=1, workers=range(1, 2))
    monkeypatch.setattr(cluster.Cluster, "current", connected)


def test_a_pipeline_without_a_strategy_is_refused() -> None:
    layers = [keras.layers.Dense(1)]
    with pytest.raises(ValueError, match="the client of one replica of 2, whose"):
        tfgpipe.PipelinedModel(layers, num_stages=1, num_microbatches=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_replicas": 2}, "Received num_replicas=2, all_reduce='reduce'"),
        ({"all_reduce": "ring"}, "all_reduce='ring', shard_replicas='none' in the"),
        ({"shard_replicas": "slots"}, "shard_replicas='slots' in the client of repl"),
        ({"devices": ["CPU:0"]}, "are those of workers 1 to 1. Received CPU:0. Name"),
    ],
)
def test_what_is_not_for_one_replica_of_its_own_workers_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tfgpipe.PipelineStrategy(num_stages=1, **arguments)


def test_a_client_that_does_not_say_which_replica_it_is_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(cluster.REPLICA_VARIABLE, "1")
    with pytest.raises(ValueError, match="Pass replica=1, and num_replicas as in"):
        cluster.connect("127.0.0.1:4000,127.0.0.1:5000")
    with pytest.raises(ValueError, match="Received 2 workers for 3 replicas"):
        cluster.connect("127.0.0.1:4000,127.0.0.1:5000", replica=1, num_replicas=3)
