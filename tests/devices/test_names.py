"""Names of devices: TPUs of a slice in the order of stages, and stand-ins."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tests.helpers import fake_tpu
from tests.helpers.tpu_slices import SLICES
from tfgpipe import devices
from tfgpipe.devices import names, tpu_topology


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize(("num_stages", "num_replicas"), [(2, 2), (4, 1), (2, 1)])
def test_neighbouring_stages_are_on_neighbouring_chips(
    monkeypatch: pytest.MonkeyPatch, name: str, num_stages: int, num_replicas: int
) -> None:
    topology = fake_tpu.Topology(SLICES[name])
    cores = {f"/task:0/device:TPU:{i}": c for i, c in enumerate(fake_tpu.cores(name))}
    monkeypatch.setattr(names, "visible_devices", lambda _: list(cores))
    found = devices.tpu_devices(
        topology, num_stages=num_stages, num_replicas=num_replicas
    )
    assert len(set(found)) == len(found) == num_stages * num_replicas
    for d in range(num_replicas):
        path = [cores[each] for each in found[d * num_stages : (d + 1) * num_stages]]
        for a, b in itertools.pairwise(path):
            assert tpu_topology.adjacent(a, b, SLICES[name])


def test_too_small_a_slice_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(names, "visible_devices", lambda _: [])
    topology = fake_tpu.Topology(SLICES["v4-8"])
    with pytest.raises(
        ValueError, match=r"4 stages x 2 replicas need 8 TPU cores.*4 c"
    ):
        devices.tpu_devices(topology, num_stages=4, num_replicas=2)


def test_tpus_come_before_gpus_before_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"TPU": ["TPU:0"], "GPU": ["GPU:0"], "CPU": ["CPU:0"]}
    monkeypatch.setattr(names, "devices_of_workers", list)
    monkeypatch.setattr(names, "visible_devices", lambda kind: there[kind])
    for kind in ("TPU", "GPU", "CPU"):
        assert devices.default_devices() == [f"{kind}:0"]
        there[kind] = []


def test_a_device_stands_for_one_of_another_type_inside_alone() -> None:
    with names.assumed_device_type("TPU"), names.assumed_device_type(None):
        assert devices.device_type("/device:CPU:1") == "TPU"
    assert devices.device_type("/device:CPU:1") == "CPU"


def test_a_strategy_for_cores_of_a_computation_names_what_replaces_it() -> None:
    with pytest.raises(AttributeError, match=r"TPUPipelineStrategy'\. Use PipelineS"):
        _ = tfgpipe.TPUPipelineStrategy


def test_what_xla_cannot_compile_is_refused_on_tpus() -> None:
    def call(rows: int | None = 4, **arguments: object) -> None:
        layer = tfgpipe.PipelinedLayer(
            [keras.layers.Dense(3)], num_microbatches=2, num_stages=1, **arguments
        )
        layer(np.ones((4, 2), "float32"))
        spec = tf.TensorSpec([rows, 2])
        with names.assumed_device_type("TPU"):
            tf.function(layer).get_concrete_function(spec)

    call()
    with pytest.raises(ValueError, match="drop_remainder=True"):
        call(rows=None)
    with pytest.raises(ValueError, match="Received `jit_compile=False` for a pipeline"):
        call(jit_compile=False)
