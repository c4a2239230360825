"""The search, beside trying everything, and what it says of those it rejects."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.planner_toys import TOY, config, layer, workload
from tfgpipe import planner, schedules
from tfgpipe.costs import PassCost
from tfgpipe.planner.parallel_config import enumerate_configs

pytestmark = pytest.mark.pure


def configs(num_devices, **values):
    usual = {"batch_size": 64, "max_stages": 16, "max_shards": 4}
    return list(enumerate_configs(num_devices=num_devices, **{**usual, **values}))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 24), st.integers(1, 96), st.integers(1, 12), st.integers(1, 8))
def test_every_layout_uses_all_devices_and_divides_the_batch(
    num_devices, batch_size, max_stages, max_shards
):
    found = configs(
        num_devices,
        batch_size=batch_size,
        max_stages=max_stages,
        max_shards=max_shards,
    )
    assert len(set(found)) == len(found)
    for each in found:
        assert each.total_devices == num_devices
        assert batch_size % (each.num_replicas * each.num_microbatches) == 0
        assert each.num_stages <= max_stages
        assert max_shards % each.num_shards == 0
        assert (
            each.schedule is schedules.gpipe
            or each.num_microbatches >= each.num_devices
        )


def test_all_schedules_that_can_run_are_there():
    found = {
        each.order for each in configs(4, microbatches=[8]) if each.num_devices > 1
    }
    assert found == {
        "gpipe",
        "1f1b",
        "zero_bubble",
        "interleaved x 2",
        "interleaved x 4",
        "eager_1f1b",
        *(f"{name} x {v}" for name in ("looped_bfs", "interleaved_zb") for v in (2, 4)),
        *(f"{name} x 2" for name in ("zbv", "v_half", "v_min", "dualpipe_v")),
    }
    few = {each.order for each in configs(4, microbatches=[2]) if each.num_devices == 4}
    assert few == {"gpipe"}


def search(model=None, **values):
    usual = {"device": TOY, "num_devices": 4, "batch_size": 16}
    return planner.search(model or workload(8), **{**usual, **values})


def test_the_best_are_those_of_trying_everything():
    result = search(num_best=7)
    request = result.request
    times = sorted(
        request.estimate(each).time.total
        for each in configs(4, batch_size=16, max_stages=8)
        if each.remat.name != "auto"  # All fits, so it saves all.
        if request.fits(each, request.memory(each, request.partition(each)))
    )
    assert [each.time.total for each in result.best] == pytest.approx(times[:7])
    assert result.num_fitting == len(times)


@settings(max_examples=8, deadline=None)
@given(st.floats(1e3, 1e4))
def test_configurations_that_are_found_fit_in_memory(memory):
    result = search(workload(4), device=dataclasses.replace(TOY, memory=memory))
    for each in result.best:
        assert each.fullest.total <= memory
    assert bool(result.best) == (result.missing_bytes == 0)


def test_nothing_fits_by_the_least_that_is_lacking():
    result = search(device=dataclasses.replace(TOY, memory=100.0))
    request = result.request
    least = min(
        max(held.total for held in request.memory(each, request.partition(each)))
        for each in configs(4, batch_size=16, max_stages=8)
    )
    assert result.best == ()
    assert result.missing_bytes == pytest.approx(least - 100)
    assert "Nothing fits: the leanest of" in str(result)
    assert "Try more devices, a smaller batch, or half precision" in str(result)


def test_every_class_is_among_the_best_or_explained():
    result = search(num_best=2)
    for name, of in {
        "D": lambda each: each.num_replicas,
        "K": lambda each: each.num_devices,
        "T": lambda each: each.num_shards,
        "schedule": lambda each: each.schedule.name,
        "remat": lambda each: each.remat,
    }.items():
        there = {f"{name}={of(each.config)}" for each in result.best}
        lost = {
            each.name for each in result.rejected if each.name.startswith(f"{name}=")
        }
        everything = {
            f"{name}={of(each)}" for each in configs(4, batch_size=16, max_stages=8)
        }
        everything.discard("remat=auto")  # All fits, so it saves all.
        assert there | lost == everything
        assert not there & lost


def test_all_reduces_are_why_shards_lose_on_a_slow_link():
    slow = dataclasses.replace(TOY, link=planner.Link(bandwidth=0.5, latency=0))
    result = search(device=slow)
    (why,) = [each.reason for each in result.rejected if each.name == "T=4"]
    assert "x the best step" in why
    assert "of it is exchanges inside layers" in why


def test_weights_are_why_one_stage_loses():
    heavy = workload(8, count=1000, max_shards=1)
    # 16 bytes a weight: 128,000 in all, 32,000 on each of four stages; with half of
    # the slots on each of two replicas 48,000 on each of two stages.
    result = search(heavy, device=dataclasses.replace(TOY, memory=45_000.0))
    whys = {each.name: each.reason for each in result.rejected}
    assert all(each.config.num_devices == 4 for each in result.best)
    assert "GiB of 0, at the least: slots" in whys["K=1"]
    assert whys["T>1"].startswith("no layer can be in a number of shards")


def test_replicas_share_out_slots_where_these_do_not_fit():
    """Two stages, two replicas: 81,000 bytes, 65,000 if each has half of the slots."""
    heavy = workload(2, count=4000, max_shards=1)
    for memory, shares in ((90_000.0, "none"), (70_000.0, "slots")):
        device = dataclasses.replace(TOY, memory=memory)
        result = search(heavy, device=device, num_best=50)
        assert {each.config.shard_replicas for each in result.best} == {shares}
        held = result.best[0].fullest
        assert held.slots == (16_000 if shares == "slots" else 32_000)
        assert ("slots / 2" in str(result)) == (shares == "slots")
    whole, shared = (
        config(num_replicas=4, num_microbatches=2, shard_replicas=shares)
        for shares in ("none", "slots")
    )
    asked = result.request
    updates = [asked.estimate(x, (2,)).time.update for x in (whole, shared)]
    assert updates[0] == pytest.approx(4 * updates[1])


def test_recomputation_is_why_remat_loses():
    result = search(remats=["none", "stage"], microbatches=[4])
    (why,) = [each.reason for each in result.rejected if each.name == "remat=stage"]
    assert "recomputing" in why


def test_auto_recomputes_what_the_device_has_no_room_for():
    asked = search().request
    each = {
        remat: config(num_devices=4, num_microbatches=8, schedule="1f1b", remat=remat)
        for remat in ("none", "auto", "stage")
    }
    cut = (2, 2, 2, 2)
    most, least = (
        [held.total for held in asked.memory(each[remat], cut)]
        for remat in ("none", "stage")
    )
    for part in (0.0, 0.3, 1.0):  # Of what the first device may recompute.
        room = part * least[0] + (1 - part) * most[0]
        small = dataclasses.replace(asked, device=dataclasses.replace(TOY, memory=room))
        held = [x.total for x in small.memory(each["auto"], cut)]
        assert held[0] == pytest.approx(room)
        assert held[1:] == pytest.approx([min(x, room) for x in most[1:]])
        assert small.fits(each["auto"], small.memory(each["auto"], cut))
        none, auto, stage = (
            small.stage_times(each[remat], cut)[0].recompute for remat in each
        )
        assert none == 0 < stage
        assert auto == pytest.approx(part * stage, abs=1e-6)
    less = dataclasses.replace(TOY, memory=0.99 * least[0])
    small = dataclasses.replace(asked, device=less)
    lacks = small.missing_bytes(each["auto"], small.memory(each["auto"], cut))
    assert lacks == pytest.approx(0.01 * least[0])


def test_auto_is_tried_where_not_all_can_be_saved():
    room = dataclasses.replace(TOY, memory=2_500.0)
    result = search(device=room, remats=["none", "auto"], num_best=50)
    request = result.request
    found = [x.config for x in result.best if x.config.remat.name == "auto"]
    assert found
    for each in found:
        saving = dataclasses.replace(each, remat="none")
        assert not request.fits(
            saving, request.memory(saving, request.partition(saving))
        )


def test_the_best_are_tried_in_the_order_for_their_stages():
    """A last layer that is long: another order hides what it waits for."""
    layers = [*workload(5).layers, layer(flops=PassCost(800, 1600))]
    uneven = dataclasses.replace(workload(5), layers=tuple(layers))
    given = {"num_devices": 3, "batch_size": 6, "microbatches": [6], "num_best": 3}
    named = search(uneven, **given)
    both = search(uneven, names=["auto", *schedules.NAMES], **given)
    assert both.best[0].time.total <= named.best[0].time.total
    tried = {x.config.schedule.name for x in both.best}
    tried |= {x.name.removeprefix("schedule=") for x in both.rejected}
    assert "auto" in tried
    assert both.num_configs > named.num_configs
    alone = search(uneven, names=["auto"], **given)
    assert alone.best == both.best


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_devices": 0}, "`num_devices` is a number of at least 1. Received"),
        ({"batch_size": -1}, "`batch_size` is a number of at least 1"),
        ({"num_slots": -1}, "`num_slots` is a number of at least 0"),
        ({"num_slots": math.nan}, "`num_slots` is a number of at least 0"),
        ({"device": "h100"}, "Received 'h100'. Did you mean"),
        ({"remats": ["stag"]}, "`remats` must be one of .* Received 'stag'"),
        ({"microbatches": [0]}, "`microbatches` must be an integer of at least 1"),
        ({"num_best": 0}, "`num_best` must be an integer of at least 1"),
        (
            {"batch_size": 3, "microbatches": [2]},
            r"Received batch_size=3 .* microbatches=\[2\]: no configuration divides it",
        ),
    ],
)
def test_wrong_questions_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        search(**values)


def test_a_workload_has_layers_and_sizes_are_not_negative():
    with pytest.raises(ValueError, match=r"at least one layer\. Received none for 'x'"):
        planner.Workload(name="x", layers=())
    with pytest.raises(ValueError, match=r"`tensors\.saved` of layer 'layer' is a fin"):
        layer(saved=-1)


def test_a_report_shows_each_of_the_best():
    result = search()
    lines = str(result).splitlines()
    best = result.best[0]
    assert lines[0].startswith("toy on 4 x toy: 80 parameters")
    assert lines[1].split()[:6] == ["D", "K", "T", "M", "schedule", "remat"]
    row = lines[2].split()
    assert row[:4] == [
        str(number)
        for number in (
            best.config.num_replicas,
            best.config.num_devices,
            best.config.num_shards,
            best.config.num_microbatches,
        )
    ]
    assert f"{1e3 * best.time.total:,.1f}" in row
    assert f"{100 * best.mfu:.1f}%" in row


def test_what_1f1b_does_not_fit_waits_on_the_host_where_there_is_a_way():
    """Eight devices, of which the first has eight microbatches in flight."""
    tried = {"num_devices": 8, "batch_size": 64, "microbatches": [16], "num_best": 9}
    tried |= {"names": ["1f1b"], "remats": ["none"]}

    def longest(**values):
        """Returns the pipeline over all devices, if one fits."""
        device = dataclasses.replace(TOY, **values)
        best = planner.search(workload(8), device=device, **tried).best
        return next((x for x in best if x.config.num_devices == 8), None)

    whole = longest()
    assert not whole.config.schedule.has_copies
    # Room for four of them.
    memory = whole.fullest.total - whole.fullest.activations / 2
    assert longest(memory=memory) is None
    fast, slow = (longest(memory=memory, host_bandwidth=x) for x in (1e30, 1e-3))
    for found in (fast, slow):
        assert found.config.schedule.has_copies
        assert found.config.load.in_flight == (4, 4, 4, 4, 4, 3, 2, 1)
        assert found.fullest.total == memory
    assert fast.time.total == pytest.approx(whole.time.total)
    assert slow.time.total > 10 * fast.time.total
    request = planner.PlanRequest(workload(8), device=TOY, num_devices=8, batch_size=64)
    with pytest.raises(ValueError, match="'toy' without a `host_bandwidth`"):
        request.estimate(fast.config)


def test_weights_are_in_slices_where_slots_alone_are_not_enough():
    """Of 8 stages of 4,000 bytes on one device, a quarter, and the rest of two.

    With all 16 bytes a weight it is 128,000; with a quarter of the slots 80,000.
    """
    heavy = workload(8, count=1000, max_shards=1)
    device = dataclasses.replace(TOY, memory=50_000.0)
    result = search(heavy, device=device, num_best=500, names=["1f1b"])
    on_one_device = [x for x in result.best if x.config.num_devices == 1]
    assert {x.config.shard_replicas for x in on_one_device} == {"weights"}
    assert "looped_bfs+gather x 8, weights / 4" in str(result)
    held = on_one_device[0].fullest
    assert held.weights == held.gradients == 8 * 4000 / 4 + 2 * 4000 * 3 / 4
    assert held.slots == 64_000 / 4
    quarters = dataclasses.replace(on_one_device[0].config, stages_per_device=4)
    held = result.request.estimate(quarters, (2, 2, 2, 2)).fullest
    assert held.weights == 8 * 4000 / 4 + 2 * 8000 * 3 / 4


def test_gathers_and_sums_of_slices_are_each_half_of_a_sum_of_gradients():
    """Two stages of 4,000 bytes, each gathered before its forward, and one again."""
    asked = search(workload(2, count=1000, max_shards=1)).request
    common = {"num_replicas": 4, "num_microbatches": 1, "stages_per_device": 2}
    plain, slices = (
        asked.estimate(
            config(**common, schedule=schedules.find(name), shard_replicas=shares),
            (1, 1),
        ).time
        for name, shares in (("looped_bfs", "slots"), ("looped_bfs+gather", "weights"))
    )
    # Six hops of a quarter of 8,000 bytes at 5 bytes a second, and 0.25 s each.
    assert plain.replicas == 6 * (2000 / 5 + 0.25)
    assert slices.replicas == plain.replicas / 2
    # Before the first pass, and before the backward of the first stage, nothing else
    # is to do; the second stage is gathered while the first works, for the most part.
    gather = 3 * (1000 / 5 + 0.25)
    assert gather < slices.pipeline - plain.pipeline < 3 * gather
