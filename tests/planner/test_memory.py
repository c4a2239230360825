"""What devices hold, beside sums by hand and the simulation of whole schedules."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.planner_toys import TOY, config, layer, request, staged, workload
from tfgpipe import schedules
from tfgpipe.planner import memory
from tfgpipe.planner.parallel_config import REMATS
from tfgpipe.simulation.simulator import Costs, simulate

pytestmark = pytest.mark.pure


def held(model, layers_per_stage, *, num_slots=2, device=TOY, **values):
    each = config(**values)
    return memory.devices(
        staged(model, each, layers_per_stage, num_slots=num_slots, device=device)
    )


def test_one_device_holds_state_and_all_activations():
    device = dataclasses.replace(TOY, reserved=7)
    (only,) = held(workload(), (4,), num_microbatches=3, device=device)
    assert only.parts == {
        "weights": 4 * 40,
        "gradients": 4 * 40,
        "slots": 8 * 40,
        "inputs": 0,
        "activations": 3 * 2 * 400,
        "recomputed": 0,
        # Of a layer: its own bytes on two examples, and a gradient of 10 weights.
        "workspace": 2 * 30 + 4 * 10,
        "reserved": 7,
    }
    assert only.state == 16 * 40
    assert only.largest == "activations"


@pytest.mark.parametrize(
    ("dtype", "size", "weights"),
    [("bfloat16", 4, 6), ("bfloat16", 2, 2), ("float64", 8, 8)],
)
def test_weights_of_more_bytes_than_products_are_copied(dtype, size, weights):
    model = workload(dtype=dtype, size=size)
    (only,) = held(model, (4,), num_slots=3)
    assert only.weights == weights * 40
    assert only.gradients == size * 40
    assert only.slots == 3 * size * 40
    assert only.workspace == 2 * 30 + size * 10


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize("remat", REMATS)
def test_a_schedule_of_ones_own_holds_what_the_named_one_does(name, remat):
    values = {"num_devices": 2, "num_microbatches": 4, "remat": remat}
    values["stages_per_device"] = 2 if name == "interleaved" else 1
    stages = (2, 2) if name != "interleaved" else (1, 1, 1, 1)
    own = config(**values, schedule=name).make_schedule()
    own = dataclasses.replace(own, name="custom")
    named = held(workload(), stages, **values, schedule=name)
    assert held(workload(), stages, **values, schedule=own) == named


def test_a_schedule_on_devices_in_another_order_holds_its_own_stages():
    schedule = schedules.gpipe(3, 4).with_placement((0, 1, 1))
    values = {"num_devices": 2, "num_microbatches": 4, "remat": "none"}
    first, second = held(workload(), (2, 1, 1), **values, schedule=schedule)
    assert first.weights == second.weights == 4 * 20


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="must be one of 'gpipe'"):
        held(workload(), (2, 2), num_devices=2, schedule="custom")


def test_weights_that_are_not_trained_have_neither_gradient_nor_slot():
    (only,) = held(workload(trained=4), (4,))
    assert (only.weights, only.gradients, only.slots) == (160, 64, 128)


def test_remat_keeps_inputs_and_one_microbatch():
    first, last = held(
        workload(), (3, 1), num_devices=2, num_microbatches=8, remat="stage"
    )
    assert (first.inputs, first.recomputed, first.activations) == (8 * 2 * 5, 600, 0)
    assert (last.inputs, last.recomputed) == (8 * 2 * 5, 200)


def test_remat_of_layers_keeps_one_layer_and_the_inputs_of_the_others():
    (only,) = held(workload(), (4,), num_microbatches=8, remat="layer")
    assert (only.inputs, only.recomputed) == (8 * 2 * 5, 2 * (100 + 3 * 5))


def test_a_compiler_leaves_the_inputs_of_layers_as_they_are():
    half = dataclasses.replace(TOY, temp_factor=0.5)
    traced = dataclasses.replace(workload(), traced=True)
    (only,) = held(traced, (4,), device=half, remat="layer")
    assert only.recomputed == 2 * (100 / 2 + 3 * 5)


@pytest.mark.parametrize(
    ("remat", "most"),
    # Of the two layers of the first stage: both; the larger, and the other's input.
    [("stage", 2 * (100 + 300)), ("layer", 2 * (300 + 5))],
)
def test_stages_of_one_device_recompute_one_at_a_time(remat, most):
    layers = (layer(), layer(saved=300), layer(), layer())
    model = dataclasses.replace(workload(), layers=layers)
    schedule = schedules.gpipe(3, 4).with_placement((0, 1, 0))
    values = {"num_devices": 2, "num_microbatches": 4, "remat": remat}
    first, second = held(model, (2, 1, 1), **values, schedule=schedule)
    assert (first.recomputed, second.recomputed) == (most, 2 * 100)


def test_a_compiler_leaves_a_share_of_what_was_counted_operation_by_operation():
    half = dataclasses.replace(TOY, temp_factor=0.5)
    formula, traced = workload(), dataclasses.replace(workload(), traced=True)
    options = {"num_microbatches": 8, "device": half, "remat": "stage"}
    (plain,), (less,) = (held(x, (4,), **options) for x in (formula, traced))
    assert less.recomputed == plain.recomputed / 2
    # Two examples of 30 bytes, and the gradient.
    assert (plain.workspace, less.workspace) == (60 + 40, 30 + 40)
    # What crosses from function to function is as it is.
    assert less.inputs == plain.inputs
    (saved,) = held(traced, (4,), **{**options, "remat": "none"})
    assert saved.activations == 8 * 2 * 4 * 100


def test_shards_share_weights_and_what_is_not_whole():
    (only,) = held(workload(), (4,), num_shards=2)
    assert only.weights == 4 * 40 / 2
    # 20 of 100 bytes are whole: 20 + 80 / 2, of four layers, on two examples.
    assert only.activations == pytest.approx(2 * 4 * 60)
    # Of a layer: its own bytes on two examples, and its gradient.
    assert only.workspace == (2 * 30 + 4 * 10) / 2


def test_a_layer_that_does_not_divide_stays_whole():
    (only,) = held(workload(max_shards=3), (4,), num_shards=2)
    assert (only.weights, only.activations) == (160, 800)


def test_beside_a_sharded_layer_one_that_does_not_divide_stays_whole():
    layers = (layer(), layer(max_shards=1, trained=4))
    model = dataclasses.replace(workload(), layers=layers)
    (only,) = held(model, (2,), num_shards=2)
    assert only.weights == 4 * (10 / 2 + 10)
    assert only.gradients == 4 * (10 / 2 + 4)
    assert only.slots == 2 * 4 * (10 / 2 + 4)
    assert only.activations == pytest.approx(2 * (60 + 100))
    assert only.workspace == 2 * 30 + 4 * 4


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize(("K", "M"), [(2, 2), (3, 4), (4, 9), (2, 20), (3, 32)])
def test_microbatches_in_flight_are_those_of_the_simulation(name, K, M):
    schedule = schedules.make(name, num_stages=K, num_microbatches=M)
    simulated = simulate(schedule, Costs(kept_bytes=1))
    counted = config(num_devices=K, num_microbatches=M, schedule=name).load.in_flight
    assert counted == simulated.peak_bytes


@pytest.mark.parametrize(
    ("K", "v", "M"), [(2, 2, 4), (2, 4, 16), (4, 2, 32), (2, 2, 64)]
)
def test_so_are_those_of_several_stages_a_device(K, v, M):
    schedule = schedules.interleaved(v * K, M, num_devices=K)
    simulated = simulate(schedule, Costs(kept_bytes=1))
    sizes = {"num_devices": K, "stages_per_device": v, "num_microbatches": M}
    counted = config(**sizes, schedule="interleaved").load.in_flight
    assert tuple(sum(counted[p::K]) for p in range(K)) == simulated.peak_bytes


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_activations_and_what_is_recomputed_are_those_of_the_simulation(name):
    K, M = 4, 8
    model = workload(8)
    found = held(
        model, (2,) * K, num_devices=K, num_microbatches=M, schedule=name, remat="stage"
    )
    schedule = schedules.make(name, num_stages=K, num_microbatches=M)
    costs = Costs(kept_bytes=2 * 5, backward_bytes=2 * 200)
    simulated = simulate(schedule, costs).peak_bytes
    ours = [each.inputs + each.recomputed for each in found]
    # The formula has both at their most; the simulation has them at one time.
    for most, one_time in zip(ours, simulated, strict=True):
        assert one_time <= most <= one_time + K * 2 * 5


CONFIGS = st.builds(
    lambda K, M, name, remat, T: config(
        num_devices=K,
        num_microbatches=max(M, K),
        schedule=name,
        remat=remat,
        num_shards=T,
    ),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(["gpipe", "1f1b", "zero_bubble"]),
    st.sampled_from(REMATS),
    st.sampled_from([1, 2, 4]),
)


@settings(max_examples=25, deadline=None)
@given(CONFIGS, st.integers(1, 6), st.integers(0, 3))
def test_parts_add_up(each, examples, num_slots):
    layers_per_stage = request(workload(6)).partition(each)
    model = staged(
        workload(6), each, layers_per_stage, examples=examples, num_slots=num_slots
    )
    for device in memory.devices(model):
        assert device.total == pytest.approx(sum(device.parts.values()))
        assert min(device.parts.values()) >= 0


@settings(max_examples=25, deadline=None)
@given(CONFIGS, st.floats(100, 1e5), st.floats(1, 100))
def test_more_memory_never_makes_a_layout_not_fit(each, size, factor):
    small, large = (
        request(workload(6), device=dataclasses.replace(TOY, memory=size * times))
        for times in (1, factor)
    )
    fits = [
        asked.fits(each, asked.memory(each, asked.partition(each)))
        for asked in (small, large)
    ]
    assert fits[1] >= fits[0]


@settings(max_examples=25, deadline=None)
@given(CONFIGS, st.integers(1, 6))
def test_recomputing_never_holds_more_than_keeping(each, examples):
    layers_per_stage = request(workload(6)).partition(
        dataclasses.replace(each, remat="none")
    )

    def most(remat):
        other = dataclasses.replace(each, remat=remat, schedule="1f1b")
        model = staged(workload(6), other, layers_per_stage, examples=examples)
        found = memory.devices(model)
        return max(device.total - device.inputs for device in found)

    assert most("layer") <= most("stage") + 1e-9
    assert most("stage") <= most("none") + 1e-9
