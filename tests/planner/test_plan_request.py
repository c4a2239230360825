"""Partitions that the planner chooses for a configuration."""

from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.planner_toys import TOY, config, layer, request, workload
from tfgpipe.costs import PassCost

pytestmark = pytest.mark.pure


def test_a_partition_is_of_the_shards_that_it_is_asked_for():
    """Two shards halve the first layer, but not the others, which do not divide."""
    whole = {"max_shards": 1, "num_reductions": 0, "traffic": PassCost(0, 40)}
    layers = (
        layer(flops=PassCost(400, 200), num_reductions=0, traffic=PassCost(0, 40)),
        *(layer(flops=PassCost(200, 200), **whole) for _ in range(2)),
    )
    fast = dataclasses.replace(TOY, bandwidth=1e12, memory=1e12)
    model = dataclasses.replace(workload(), layers=layers)
    one = request(model, device=fast)
    values = {"num_devices": 2, "num_microbatches": 4}
    assert one.partition(config(num_shards=1, **values)) == (1, 2)
    assert one.partition(config(num_shards=2, **values)) == (2, 1)


def test_a_partition_by_memory_counts_weights_in_their_own_type():
    """Six numbers of 2 bytes are less than four of 4."""
    sizes = [(6, 2), (6, 2), (4, 4), (1, 4)]
    layers = tuple(
        layer(count=n, size=size, saved=0, replicated=0) for n, size in sizes
    )
    model = dataclasses.replace(workload(), layers=layers)
    asked = request(model, device=dataclasses.replace(TOY, memory=1.0))
    # 12 + 12 | 16 + 4 bytes, four times each with two slots and a gradient.
    assert asked._best_partition(config(num_devices=2), asked._bytes) == (2, 2)
    assert [asked._bytes(config(), each, asked.device) for each in layers] == [
        48,
        48,
        64,
        16,
    ]
