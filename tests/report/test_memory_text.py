"""What devices hold, as text."""

from __future__ import annotations

import pytest

from tfgpipe.report.memory import DeviceMemory, draw_memory

pytestmark = pytest.mark.pure


def test_replicas_are_below_and_stages_beside_one_another() -> None:
    grid = [
        [[DeviceMemory(f"CPU:{2 * d + k}", f"layer{k}", 2048, None)] for k in range(2)]
        for d in range(2)
    ]
    assert draw_memory(grid).splitlines() == [
        "           stage 0  stage 1",
        "replica 0  CPU:0    CPU:1",
        "           layer0   layer1",
        "           2.0 KiB  2.0 KiB",
        "replica 1  CPU:2    CPU:3",
        "           layer0   layer1",
        "           2.0 KiB  2.0 KiB",
    ]


def test_shards_of_a_stage_are_below_one_another() -> None:
    shards = [DeviceMemory(f"CPU:{t}", "mlp", 1024, 2048) for t in range(2)]
    assert [line.split()[-1] for line in draw_memory([[shards]]).splitlines()] == [
        "0",
        "CPU:0",
        "mlp",
        "KiB",
        "CPU:1",
        "mlp",
        "KiB",
    ]


def test_a_stage_with_fewer_shards_leaves_the_rest_empty() -> None:
    one, two = DeviceMemory("CPU:0", "a", 1, None), DeviceMemory("CPU:1", "b", 1, None)
    lines = draw_memory([[[one], [one, two]]]).splitlines()
    assert lines[-3].split() == ["CPU:1"]
