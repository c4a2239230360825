"""Devices of several kinds: time, memory, cut and search are for each stage's own."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.helpers.planner_toys import TOY, config, request, workload
from tfgpipe import planner
from tfgpipe.planner.parallel_config import enumerate_configs

pytestmark = pytest.mark.pure

SLOW = dataclasses.replace(
    TOY,
    name="slow",
    flops={name: peak / 4 for name, peak in TOY.flops.items()},
    bandwidth=TOY.bandwidth / 4,
)
MODEL = workload(8)


def both(second, **values):
    return request(MODEL, num_devices=2, more=((second, 2),), **values)


def cuts(num_stages):
    for ends in itertools.combinations(range(1, 8), num_stages - 1):
        yield [b - a for a, b in itertools.pairwise((0, *ends, 8))]


def test_a_stage_takes_the_time_of_its_device():
    asked, alone = both(SLOW), request(MODEL)
    given = config(num_devices=4, num_microbatches=4)
    times = asked.stage_times(given, (2, 2, 2, 2))
    on_toys = alone.stage_times(given, (2, 2, 2, 2))
    for k, factor in enumerate((1, 1, 4, 4)):
        assert times[k].total == pytest.approx(factor * on_toys[k].total)
    found = asked.estimate(given, (2, 2, 2, 2))
    assert found.devices == (TOY, TOY, SLOW, SLOW)
    assert found.time.total > alone.estimate(given, (2, 2, 2, 2)).time.total
    assert found.time.update == pytest.approx(
        4 * alone.estimate(given, (2, 2, 2, 2)).time.update
    )
    flops = alone.estimate(given, (2, 2, 2, 2))
    peaks = 2 + 2 / 4
    assert found.mfu * found.time.total * peaks == pytest.approx(
        flops.mfu * flops.time.total * 4
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_no_other_cut_has_a_faster_slowest_stage(schedule):
    v = 2 if schedule == "interleaved" else 1
    given = config(
        num_devices=2, num_microbatches=4, schedule=schedule, stages_per_device=v
    )
    asked = both(SLOW)

    def slowest(cut):
        return max(stage.total for stage in asked.stage_times(given, cut))

    chosen = asked.partition(given)
    assert slowest(chosen) == pytest.approx(min(map(slowest, cuts(2 * v))))
    assert sum(chosen[0::2]) > sum(chosen[1::2])


def test_the_smaller_devices_decide_what_fits():
    given = config(num_devices=4, num_microbatches=4, schedule="1f1b")
    alone = request(MODEL)
    held = [x.total for x in alone.memory(given, alone.partition(given))]
    assert held[0] > held[2]
    small = dataclasses.replace(TOY, name="small", memory=(held[0] + held[2]) / 2)
    asked = both(small)
    there = asked.memory(given, asked.partition(given))
    assert asked.fits(given, there)
    full = [x.total for x in there]
    assert max(full) == full[0]
    left = max(
        full[0] - TOY.memory,
        full[1] - TOY.memory,
        *(x - small.memory for x in full[2:]),
    )
    assert asked.missing_bytes(given, there) == left == full[2] - small.memory
    others = request(MODEL, device=small, num_devices=2, more=((TOY, 2),))
    cut = others.partition(given)
    assert cut[0] < 2
    missing = others.missing_bytes(given, others.memory(given, cut))
    found = others.estimate(given)
    assert missing == found.missing_bytes
    if missing > 0:
        assert found.fullest in found.memory[:2]
    for each in cuts(4):
        lacks = others.missing_bytes(given, others.memory(given, each))
        assert missing <= 0 or lacks > 0


def test_the_best_are_those_of_trying_everything():
    kinds = {"device": (TOY, SLOW), "num_devices": (2, 2), "batch_size": 16}
    result = planner.search(MODEL, num_best=5, **kinds)
    asked = result.request
    times = []
    for each in enumerate_configs(
        num_devices=4, batch_size=16, max_stages=8, max_shards=4
    ):
        if each.num_devices % 2 or each.remat.name == "auto":  # As all fits, none.
            continue
        if asked.fits(each, asked.memory(each, asked.partition(each))):
            times.append(asked.estimate(each).time.total)
    assert [x.time.total for x in result.best] == pytest.approx(sorted(times)[:5])
    assert all(x.config.num_devices % 2 == 0 for x in result.best)
    assert "on 2 x toy and 2 x slow: " in str(result)
    assert "fit into 0 and 0 GiB." in str(result)


def test_two_of_a_kind_are_one():
    one = planner.search(MODEL, device=TOY, num_devices=4, batch_size=16)
    two = planner.search(MODEL, device=(TOY, TOY), num_devices=(2, 2), batch_size=16)
    times = {str(x.config): x.time.total for x in one.best}
    for x in two.best:
        assert times.get(str(x.config), x.time.total) == pytest.approx(x.time.total)


def test_pipelines_that_cannot_have_all_in_proportion_are_not_tried():
    with pytest.raises(ValueError, match="in proportion"):
        planner.search(
            workload(2), device=(TOY, SLOW), num_devices=(3, 1), batch_size=4
        )


@pytest.mark.parametrize("counts", [4, (4,), (2, 2, 2)])
def test_there_is_a_number_for_each_kind(counts):
    with pytest.raises(ValueError, match="a number of devices of each kind"):
        planner.search(MODEL, device=(TOY, SLOW), num_devices=counts, batch_size=16)
