"""The platforms that can be compiled for, and their topologies."""

from __future__ import annotations

import pytest

from tfgpipe.accelerators import PLATFORMS, find, roofline_seconds

pytestmark = pytest.mark.pure


def test_an_unknown_platform_is_refused_and_the_known_are_named():
    with pytest.raises(ValueError, match=r"tpu-v5e.*h100-80g.*'h100'.*Did you mean h"):
        find("h100")


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_platform_has_the_memory_of_the_planner_and_a_topology(name):
    platform = find(name)
    assert platform.name == name
    assert platform.memory_bytes == platform.device.memory
    assert (
        platform.topology()["platform"] == {"gpu": "cuda", "tpu": "tpu"}[platform.kind]
    )


def test_a_topology_has_as_many_devices_as_partitions():
    assert find("tpu-v5e").topology(4)["topology_name"] == "v5e:2x2"
    assert find("tpu-v5e").topology(5)["topology_name"] == "v5e:2x4"
    assert find("tpu-v5p").topology(5)["topology_name"] == "v5p:2x2x2"
    assert find("h100-80g").topology(3)["topology"] == "1x1x3"
    with pytest.raises(ValueError, match=r"256 devices\. Received 257"):
        find("tpu-v6e").topology(257)


def test_a_gpu_is_described_with_the_figures_of_the_planner():
    config = find("a100-40g").topology()["target_config"]
    assert f"device_memory_size: {40 * 2**30}\n" in config
    assert "memory_bandwidth: 1555000000000\n" in config
    assert "major: 8 minor: 0" in config
    assert config.count("{") == config.count("}")


def test_the_roofline_is_the_longer_of_computing_and_moving():
    tpu = find("tpu-v5e")
    assert roofline_seconds(197e12, 0, tpu) == 1
    assert roofline_seconds(197e12, 2 * 819e9, tpu) == 2
    gpu = find("a100-80g")
    assert roofline_seconds(156e12, 0, gpu, dtype="float32") == 1
