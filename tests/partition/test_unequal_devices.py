"""Devices of unequal speed and memory: the cut, the order, and what is saved."""

import itertools
import json

import keras
import numpy as np
import pytest

import tfgpipe
from tests.helpers import compare
from tfgpipe.costs import SegmentProfiler
from tfgpipe.remat import AutoRemat
from tfgpipe.simulation import AutoSchedule

WIDTHS = (16, 8, 64, 32, 8, 24, 16)
X = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")
GIVEN = {"num_stages": 3, "num_microbatches": 4, "schedule": "1f1b"}
SPEEDS = (1.0, 0.25, 0.5)


def model():
    made = keras.Sequential([keras.Input((16,))])
    for width in WIDTHS:
        made.add(keras.layers.Dense(width, activation="tanh"))
    return made


def cuts(num_stages):
    for ends in itertools.combinations(range(1, len(WIDTHS)), num_stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *ends, len(WIDTHS))))


def stage_sums(values, cut):
    ends = [0, *itertools.accumulate(cut)]
    return [sum(values[a:b]) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("remat", ["none", "stage", "except_last"])
def test_no_other_cut_is_better_for_the_speeds(remat):
    plan = tfgpipe.plan(
        model(), balance="flops", device_speeds=SPEEDS, remat=remat, **GIVEN
    )
    layers = plan.profile.layers
    again = {"none": (0, 0, 0), "stage": (1, 1, 1), "except_last": (0.75, 0.75, 0)}

    def slowest(cut):
        forward = stage_sums([x.flops.forward for x in layers], cut)
        backward = stage_sums([x.flops.backward for x in layers], cut)
        each = zip(forward, backward, again[remat], SPEEDS, strict=True)
        return max((f + b + n * f) / speed for f, b, n, speed in each)

    assert max(stage.cost for stage in plan.stages) == pytest.approx(
        slowest(plan.calls_per_stage)
    )
    assert slowest(plan.calls_per_stage) == pytest.approx(min(map(slowest, cuts(3))))
    even = tfgpipe.plan(model(), balance="flops", remat=remat, **GIVEN)
    assert slowest(plan.calls_per_stage) < slowest(even.calls_per_stage)


def test_by_weights_too_which_no_trace_is_needed_for():
    given = {**GIVEN, "device_speeds": SPEEDS}
    plan = tfgpipe.plan(model(), **given)
    weights = [x.weights.count for x in plan.profile.layers]

    def slowest(cut):
        each = zip(stage_sums(weights, cut), SPEEDS, strict=True)
        return max(n / speed for n, speed in each)

    assert slowest(plan.calls_per_stage) == min(map(slowest, cuts(3)))
    piped = tfgpipe.pipeline(model(), **given)
    counts = tuple(len(stage.segment.calls) for stage in piped.stages)
    assert counts == plan.calls_per_stage


def test_the_order_is_for_the_speeds():
    given = {**GIVEN, "partition": (3, 2, 2), "remat": "none"}
    equal = tfgpipe.plan(model(), **given).costs
    given |= {"device_speeds": SPEEDS, "schedule": "auto"}
    plan = tfgpipe.plan(model(), **given)
    for name in ("forward", "backward"):
        each = zip(getattr(equal, name), SPEEDS, strict=True)
        assert getattr(plan.costs, name) == tuple(x / speed for x, speed in each)
    piped = tfgpipe.pipeline(model(), **given)
    found = tfgpipe.simulate(piped.schedule, plan.costs).timeline.step_time
    for name in ("1f1b", "zero_bubble", "gpipe"):
        named = tfgpipe.schedules.make(name, num_stages=3, num_microbatches=4)
        assert found <= tfgpipe.simulate(named, plan.costs).timeline.step_time


def test_measured_stage_times_are_those_of_their_devices():
    """Layers that take as long on equal devices are dealt by the speeds."""
    given = {**GIVEN, "num_stages": 2, "device_speeds": (1.0, 0.4)}
    plan = tfgpipe.plan(model(), partition=(4, 3), **given)
    seconds = [
        sum(x.weights.count for x in plan.profile.layers[span]) / speed
        for span, speed in ((slice(0, 4), 1.0), (slice(4, 7), 0.4))
    ]
    by_time = plan.rebalance(seconds)
    sums = [x.seconds.forward + x.seconds.backward for x in by_time.profile.layers]

    def slowest(cut):
        return max(n / s for n, s in zip(stage_sums(sums, cut), (1, 0.4), strict=True))

    assert sum(sums) == pytest.approx(sum(x.weights.count for x in plan.profile.layers))
    assert slowest(by_time.calls_per_stage) == pytest.approx(min(map(slowest, cuts(2))))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_each_device_has_its_limit(schedule):
    """Of the cuts of which one is as lean as can be on the smaller devices."""
    K = 4 if schedule == "interleaved" else 3
    given = {"num_stages": K, "num_microbatches": 4, "schedule": schedule}

    def bytes_of(cut):
        return tfgpipe.plan(model(), partition=cut, **given).device_bytes

    held = {cut: bytes_of(cut) for cut in cuts(K)}
    wanted = min(held, key=lambda cut: held[cut][-1])  # The last device is small.
    limits = held[wanted]
    plan = tfgpipe.plan(model(), memory_limit=limits, balance="flops", **given)
    fits = [b <= limit for b, limit in zip(plan.device_bytes, limits, strict=True)]
    assert all(fits)
    assert plan.fullest in [*zip(plan.device_bytes, limits, strict=True)]
    even = tfgpipe.plan(model(), balance="flops", **given).device_bytes
    assert any(b > limit for b, limit in zip(even, limits, strict=True))
    with pytest.raises(ValueError, match="memory_limit"):
        tfgpipe.plan(model(), memory_limit=[x / 50 for x in limits], **given)
    with pytest.raises(ValueError, match=r"bytes on one device, [\d,]+ more"):
        tfgpipe.plan(model(), memory_limit=(1, *limits[1:]), partition=wanted, **given)


def test_it_trains_as_the_plain_model_and_is_saved(tmp_path):
    limits = (10**9, 2 * 10**9, 10**9)
    given = {**GIVEN, "device_speeds": SPEEDS, "memory_limit": limits}
    pair = compare.model_pair(model, **given)
    compare.train_alike(pair, X, X, 16)
    loaded = compare.reloaded(pair[1], tmp_path)
    assert loaded.config == pair[1].config
    assert loaded.config.device_speeds == SPEEDS
    assert loaded.config.memory_limit == limits


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device_speeds": (1, 0.5)}, r"2 for 3 devices: device_speeds=\[1, 0.5\]"),
        ({"memory_limit": (1e9, 1e9)}, r"2 for 3 devices: memory_limit="),
        ({"device_speeds": (1, 0, 1)}, r"`device_speeds` must be a positive number"),
        ({"device_speeds": 2}, r"`device_speeds` must be a positive number"),
        ({"memory_limit": (1e9, -1, 1e9)}, r"`memory_limit` must be a number"),
    ],
)
@pytest.mark.parametrize("face", [tfgpipe.plan, tfgpipe.pipeline])
def test_wrong_arguments_are_refused(face, wrong, message):
    with pytest.raises(ValueError, match=message):
        face(model(), **GIVEN, **wrong)


@pytest.mark.parametrize(
    "made", [AutoRemat(memory_limit=[1e9, 2e9]), AutoSchedule(memory_limit=[1e9, 2e9])]
)
def test_limits_of_each_device_come_back_from_a_configuration(made):
    """JSON has lists, which have no hash."""
    config = json.loads(json.dumps(made.get_config()))
    again = type(made).from_config(config)
    assert again == made
    assert hash(again) == hash(made)
    assert again.memory_limit == (1e9, 2e9)


def test_auto_within_limits_of_other_devices_says_so():
    piped = tfgpipe.pipeline(model(), remat=AutoRemat(memory_limit=(1e9,)), **GIVEN)
    piped.compile("sgd", "mse")
    with pytest.raises(ValueError, match="1 for 3 devices: memory_limit"):
        piped.fit(X, X, batch_size=16, verbose=0)


def test_speeds_are_measured_with_the_layers(monkeypatch):
    """Devices that take twice and four times as long are found, and cut for."""
    slower = {"CPU:0": 1.0, "CPU:1": 4.0, "CPU:2": 2.0}
    measure = SegmentProfiler.measure_seconds
    first = []

    def measured(self, inputs, device):
        first.append(first[0] if first else measure(self, inputs, device))
        factor = slower[device[device.index("CPU:") :]]
        return [x / (1 / factor) for x in first[0]]

    monkeypatch.setattr(SegmentProfiler, "measure_seconds", measured)
    given = {**GIVEN, "balance": "time"}
    plan = tfgpipe.plan(model(), device=[*slower], **given)
    assert plan.settings.speeds == pytest.approx(SPEEDS)
    assert "of speeds 1.00, 0.25, 0.50" in str(plan)
    told = tfgpipe.plan(model(), device_speeds=plan.settings.speeds, **given)
    assert told.calls_per_stage == plan.calls_per_stage
    assert told.costs == plan.costs


def test_devices_as_they_are_have_a_speed_each():
    plan = tfgpipe.plan(
        model(), balance="time", device=["CPU:0", "CPU:1", "CPU:2"], **GIVEN
    )
    assert plan.settings.speeds[0] == 1
    assert min(plan.settings.speeds) > 0
    assert len(plan.settings.speeds) == 3


@pytest.mark.parametrize(
    "others",
    [{}, {"balance": "time", "device_speeds": SPEEDS}, {"partition": (2, 2, 3)}],
)
def test_speeds_that_nothing_would_use_are_not_measured(others):
    with pytest.raises(ValueError, match="The speeds of devices are measured for"):
        tfgpipe.plan(model(), device=["CPU:0", "CPU:1", "CPU:2"], **GIVEN, **others)
    with pytest.raises(ValueError, match=r"3 here, .*Received 2 devices"):
        tfgpipe.plan(model(), device=["CPU:0", "CPU:1"], balance="time", **GIVEN)
