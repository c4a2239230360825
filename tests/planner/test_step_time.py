"""How long steps take, beside sums by hand and the simulation of whole schedules."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.planner_toys import TOY, config, layer, request, staged, workload
from tfgpipe import schedules
from tfgpipe.costs import PassCost
from tfgpipe.planner import step_time
from tfgpipe.planner.devices import Link
from tfgpipe.simulation.simulator import Costs, simulate

pytestmark = pytest.mark.pure


def test_a_layer_takes_its_products_and_its_traffic():
    # Of 2 examples: 200 FLOP at 100 a second, 10 weights of 4 bytes at 10 a second, and
    # half of 40 bytes at 10 a second.
    seconds = step_time.layer_seconds(
        layer(), examples=2, num_shards=1, device=TOY, dtype="float32"
    )
    assert seconds.forward == pytest.approx(2 + 4 + 2)
    # A backward reads weights, and reads and writes the sum of gradients.
    seconds = step_time.layer_seconds(
        layer(), examples=2, num_shards=1, device=TOY, dtype="bfloat16"
    )
    assert seconds.backward == pytest.approx(400 / 200 + 10 * (2 + 8) / 10 + 4)


def test_shards_share_arithmetic_and_what_is_not_whole():
    seconds = step_time.layer_seconds(
        layer(), examples=2, num_shards=2, device=TOY, dtype="float32"
    )
    assert seconds.forward == pytest.approx(1 + 2 + 0.6 * 2)


def test_shards_reduce_twice_in_each_pass():
    each = config(num_shards=2, remat="stage")
    (stage,) = step_time.stage_times(staged(workload(1), each, (1,)))
    # 10 bytes of two examples, on a ring of two: two hops of 5 bytes at 5 a second.
    once = 2 * (5 / 5 + 0.25)
    assert stage.reductions.total == pytest.approx(3 * 2 * once)
    assert stage.forward == pytest.approx(1 + 2 + 1.2 + 2 * once)
    assert stage.recompute == stage.forward


def test_a_layer_that_cannot_be_sharded_reduces_nothing():
    layers = (layer(), layer(max_shards=1))
    (stage,) = step_time.stage_times(
        staged(
            dataclasses.replace(workload(), layers=layers),
            config(num_shards=2, remat="layer"),
            (2,),
            examples=2,
            device=TOY,
        )
    )
    # The other one reduces twice, 2.5 s each, and all that twice before its backward.
    assert stage.reductions.forward == pytest.approx(5)
    assert stage.reductions.backward == pytest.approx(5)
    assert stage.reductions.recompute == pytest.approx(2 * 5)
    assert stage.forward == pytest.approx(4.2 + 8 + 5)


def test_an_action_has_an_overhead_and_all_layers_but_the_last_recompute_twice():
    device = dataclasses.replace(TOY, overhead=0.5)
    (stage,) = step_time.stage_times(
        staged(workload(2), config(remat="layer"), (2,), examples=2, device=device)
    )
    assert stage.forward == pytest.approx(2 * 8 + 0.5)
    assert stage.recompute == pytest.approx((2 + 1) * 8)


def test_a_ring_sends_each_byte_twice_but_for_one_share():
    link = Link(bandwidth=10, latency=1)
    assert step_time.ring_seconds(40, 1, link) == 0
    assert step_time.ring_seconds(40, 4, link) == pytest.approx(2 * 3 * (1 + 1))


def test_replicas_sum_gradients_and_update_their_weights():
    asked = request(workload(2), num_devices=4)
    time = asked.estimate(config(num_replicas=4)).time
    assert time.replicas == pytest.approx(2 * 3 * (4 * 20 / 4 / 5 + 0.25))
    # 20 weights: gradients read, weights and two slots read and written.
    assert time.update == pytest.approx(4 * 20 * 7 / 10)
    assert time.total == pytest.approx(time.pipeline + time.replicas + time.update)


def test_early_sums_are_waited_for_as_far_as_they_take_longer_than_backwards():
    """The last microbatch of one example: 200 FLOP and 40 bytes a layer, backwards."""
    asked = request(workload(2), num_devices=4)
    each = {"num_replicas": 4, "num_microbatches": 2}
    last = asked.estimate(config(**each)).time
    early = asked.estimate(config(**each, sum_when="early")).time
    # Products, three times the weights' bytes, and half of those of the rest.
    backwards = 2 * (200 / 100 + 3 * 10 * 4 / 10 + 0.5 * 40 / 10)
    ring = 2 * 3 * (4 * 20 / 4 / 5 + 0.25)
    assert last.replicas == pytest.approx(ring)
    assert early.replicas == pytest.approx(max(ring - backwards, 0)) == 0
    slow = dataclasses.replace(TOY, link=Link(bandwidth=0.5, latency=0.25))
    early = request(workload(2), num_devices=4, device=slow).estimate(
        config(**each, sum_when="early")
    )
    ring = 2 * 3 * (4 * 20 / 4 / 0.5 + 0.25)
    assert early.time.replicas == pytest.approx(ring - backwards)
    assert early.time.pipeline == pytest.approx(last.pipeline)


def test_early_sums_of_slices_are_amid_backwards_beside_gathers():
    """The sum is half of an all-reduce, and the gathers of two stages as much."""
    slow = dataclasses.replace(TOY, link=Link(bandwidth=2.5, latency=0.0))
    asked = request(workload(2), num_devices=4, device=slow)
    each = {"num_replicas": 4, "num_microbatches": 2, "shard_replicas": "weights"}
    each |= {"schedule": "looped_bfs+gather", "stages_per_device": 2}
    last, early = (
        asked.estimate(config(**each, sum_when=when), (1, 1)).time
        for when in ("last", "early")
    )
    assert last.replicas == pytest.approx(3 * 4 * 20 / 4 / 2.5)
    # A stage is gathered for as long as its gradients are summed.
    backward = 200 / 100 + 3 * 10 * 4 / 10 + 0.5 * 40 / 10
    gather = 3 * 4 * 10 / 4 / 2.5
    beside = 2 * (backward - gather)
    assert early.replicas == pytest.approx(last.replicas - beside)
    assert (last.replicas, beside) == pytest.approx((24, 8))


def test_a_time_of_sums_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="`sum_when` must be one of 'last', 'early'"):
        config(sum_when="never")


def test_replicas_over_several_groups_use_the_cards_of_each():
    """Of four devices of a group every second is of one ring."""
    with_cards = dataclasses.replace(TOY, network_cards=4)
    asked = request(workload(4), num_devices=16, batch_size=16, device=with_cards)
    time = asked.estimate(config(num_replicas=8, num_devices=2)).time
    assert time.replicas == pytest.approx(2 * 7 * (4 * 20 / 8 / 2 + 1.0))


def test_replicas_of_other_groups_are_slower():
    asked = request(workload(4), num_devices=16, batch_size=16)
    time = asked.estimate(config(num_replicas=8, num_devices=2)).time
    assert time.replicas == pytest.approx(2 * 7 * (4 * 20 / 8 / 1 + 1.0))


def test_the_device_of_most_trained_weights_updates_last():
    # Device 0: half of 10 weights, and 4 of 10 that cannot be sharded; device 1: half.
    layers = (layer(), layer(max_shards=1, trained=4), layer())
    replicas, update = step_time.update_times(
        staged(
            dataclasses.replace(workload(), layers=layers),
            config(num_replicas=2, num_devices=2, num_shards=2),
            (2, 1),
            num_slots=2,
            device=TOY,
        )
    )
    # Eight devices are in two groups: 1 byte a second and a latency of 1.
    assert replicas == pytest.approx(2 * (4 * 9 / 2 / 1 + 1))
    assert update == pytest.approx(4 * 9 * 7 / 10)


def test_one_device_has_no_bubble():
    time = request(workload(2)).estimate(config(num_microbatches=4)).time
    assert (time.bubble, time.replicas) == (0, 0)
    # 2 layers x 4 microbatches of 2 examples: 8 s forward, 4 + 12 + 4 s backward.
    assert time.pipeline == pytest.approx(2 * 4 * (8 + 20))


def test_a_layer_without_products_takes_its_traffic():
    each = layer(flops=PassCost())
    assert step_time.layer_seconds(
        each, examples=2, num_shards=1, device=TOY, dtype="float32"
    ) == PassCost(2, 4)


@pytest.mark.parametrize("own", [False, True])
def test_a_pipeline_of_two_takes_what_was_worked_out_by_hand(own):
    """Forward 8, backward 20; 10 bytes take 2 and a latency of 1/4.

    device 0      F0 0-8, F1 8-16                             B0 40.5-60.5, B1 68.5-88.5
    device 1      F0 10.25-18.25, B0 18.25-38.25, F1 38.25-46.25, B1 46.25-66.25
    """
    schedule = schedules.one_f_one_b(2, 2)
    if own:
        schedule = dataclasses.replace(schedule, name="custom")
    each = config(
        num_devices=2, num_microbatches=2, schedule=schedule if own else "1f1b"
    )
    time = request(workload(2), num_devices=2, batch_size=4).estimate(each).time
    assert time.pipeline == pytest.approx(88.5)
    assert time.bubble == pytest.approx(1 - 56 / 88.5)


def test_a_step_of_unlike_stages_takes_what_was_worked_out_by_hand():
    """Two layers in two shards, then a whole one; two groups of two devices.

    Device 0: forward 2 x 4.2 and 2 x 5 of reductions, backward 2 x 10.4 and as many,
    after another forward. Device 1: 8 and 20, after 8. 20 bytes take 20, then 1.

    device 0   F0 0-18.4, F1 18.4-36.8                   B1 116.4-165.6, B0 165.6-214.8
    link       0 18.4-38.4, 1 38.4-58.4
    device 1   F0 39.4-47.4, F1 59.4-67.4, B1 67.4-95.4, B0 95.4-123.4
    """
    layers = (layer(), layer(), layer(max_shards=1, inputs=10))
    time = step_time.step_time(
        staged(
            dataclasses.replace(workload(), layers=layers),
            config(num_devices=2, num_shards=2, num_microbatches=2, remat="stage"),
            (2, 1),
            examples=2,
            num_slots=2,
            device=dataclasses.replace(TOY, group=2),
        )
    )
    assert time.pipeline == pytest.approx(214.8)
    # Of the busiest device, twice.
    assert time.arithmetic == pytest.approx(2 * 2 * (4.2 + 10.4))
    assert time.recompute == pytest.approx(2 * 2 * 4.2)
    assert time.reductions == pytest.approx(2 * 3 * 2 * 5)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("K", "M"), [(2, 4), (4, 8), (4, 32)])
def test_even_stages_have_the_bubble_of_the_papers(name, K, M):
    free = dataclasses.replace(
        TOY, link=Link(bandwidth=1e30, latency=0), overhead=0, group=100
    )
    asked = request(workload(K), device=free, batch_size=M)
    time = asked.estimate(config(num_devices=K, num_microbatches=M, schedule=name)).time
    assert time.bubble == pytest.approx((K - 1) / (M + K - 1))


@pytest.mark.parametrize(
    ("name", "K", "v"),
    [("gpipe", 4, 1), ("1f1b", 4, 1), ("zero_bubble", 4, 1), ("interleaved", 4, 2)],
)
def test_a_long_step_goes_on_as_it_began(name, K, v, monkeypatch):
    each = config(
        num_devices=K,
        stages_per_device=v,
        num_microbatches=64,
        schedule=name,
        remat="stage",
    )
    given = staged(workload(K * v), each, (1,) * (K * v), examples=1, device=TOY)
    stages = step_time.stage_times(given)
    costs = dataclasses.replace(
        step_time.stage_costs(given, stages),
        boundary_bytes=[5] * (K * v - 1),
        bandwidth=50,
        latency=0.01,
    )

    def seconds():
        return step_time.pipeline(each, stages, costs)[0]

    exact = seconds()
    monkeypatch.setattr(step_time, "MOST_ACTIONS", 0)
    assert seconds() == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "waiting"),
    [("gpipe", 8 + 20), ("1f1b", 8 + 20), ("zero_bubble", 8), ("interleaved", 28)],
)
def test_a_lower_bound_is_the_work_of_a_device_and_its_wait_for_the_first(
    name, waiting
):
    each = config(num_devices=2, num_microbatches=4, schedule=name)
    bound = request(workload(2)).lower_bound_seconds(each, (1, 1))
    # And the update of 10 weights, of which 7 x 4 bytes are read or written.
    assert bound == pytest.approx(4 * (8 + 20) + waiting + 10 * 4 * 7 / 10)


CONFIGS = st.builds(
    lambda K, v, M, name, remat: config(
        num_devices=K,
        num_microbatches=M * K,
        schedule=name,
        remat=remat,
        stages_per_device=v if name == "interleaved" else 1,
    ),
    st.integers(1, 4),
    st.sampled_from([1, 2]),
    st.integers(1, 4),
    st.sampled_from(schedules.NAMES),
    st.sampled_from(["none", "stage", "layer"]),
)


@settings(max_examples=25, deadline=None)
@given(CONFIGS, st.lists(st.floats(1, 100), min_size=8, max_size=8))
def test_no_step_is_faster_than_its_bound(each, flops):
    layers = tuple(layer(flops=PassCost(f, 2 * f)) for f in flops)
    model = dataclasses.replace(workload(), layers=layers)
    asked = request(model, batch_size=each.num_microbatches, num_devices=4)
    layers_per_stage = asked.partition(each)
    bound = asked.lower_bound_seconds(each, layers_per_stage)
    assert bound <= asked.estimate(each, layers_per_stage).time.total * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(CONFIGS)
def test_utilisation_is_at_most_what_products_reach(each):
    model = workload(8)
    asked = request(model, batch_size=each.num_microbatches, num_devices=4)
    found = asked.estimate(each)
    assert 0 < found.mfu <= TOY.efficiency
    work = model.flops * each.num_microbatches
    peak = 200 * each.num_devices
    assert found.mfu == pytest.approx(work / (found.time.total * peak))


def test_early_recomputation_fills_the_wait_for_gradients():
    # K = 2, M = 1: 2 forwards, a recomputation of the last stage, 2 backwards of 2.
    costs = Costs(forward=1, backward=2, recompute=1)
    early = dataclasses.replace(costs, recompute_when="early")
    schedule = schedules.gpipe(2, 1)
    assert simulate(schedule, costs).timeline.step_time == 8
    assert simulate(schedule, early).timeline.step_time == 7


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 8))
def test_early_recomputation_of_even_stages(K, M):
    early = Costs(forward=1, backward=2, recompute=1, recompute_when="early")
    time = simulate(schedules.gpipe(K, M), early).timeline.step_time
    # The last stage waits for nothing; those before have only backwards to come.
    assert time == (M + K - 1) + 3 * M + 2 * (K - 1)


@pytest.mark.parametrize("num_microbatches", [8, 64])
def test_an_order_that_is_searched_for_fits_the_device(num_microbatches):
    sizes = {"num_devices": 4, "num_microbatches": num_microbatches, "remat": "none"}
    given = {"batch_size": 2 * num_microbatches}
    large = request(workload(8), **given)
    usual = large.estimate(config(schedule="1f1b", **sizes), (2,) * 4)
    free = large.estimate(config(schedule="auto", **sizes), (2,) * 4)
    assert free.time.pipeline <= usual.time.pipeline * (1 + 1e-9)
    room = max(held.total for held in usual.memory)
    assert max(held.total for held in free.memory) > room
    small = request(workload(8), device=dataclasses.replace(TOY, memory=room), **given)
    found = small.estimate(config(schedule="auto", **sizes), (2,) * 4)
    assert max(held.total for held in found.memory) <= room
    assert found.time.pipeline <= usual.time.pipeline * (1 + 1e-9)
    # Where nothing fits, that is what is said.
    little = dataclasses.replace(TOY, memory=room / 8)
    tiny = request(workload(8), device=little, **given)
    lost = tiny.estimate(config(schedule="auto", **sizes), (2,) * 4)
    assert lost.missing_bytes > 0


def test_an_order_that_is_searched_for_is_for_the_stages():
    sizes = {"num_devices": 3, "num_microbatches": 6, "remat": "none"}
    given = request(workload(6))
    partition = (1, 3, 2)
    found = given.estimate(config(schedule="auto", **sizes), partition)
    assert (
        found.config.schedule.costs.forward[1] > found.config.schedule.costs.forward[0]
    )
    for name in ("gpipe", "1f1b", "zero_bubble"):
        named = given.estimate(config(schedule=name, **sizes), partition)
        assert found.time.pipeline <= named.time.pipeline * (1 + 1e-9), name
        assert given.estimate(named.config, partition) == named
