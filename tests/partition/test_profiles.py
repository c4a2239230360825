"""Costs of stages, beside numbers by hand."""

from __future__ import annotations

import dataclasses
import itertools
import operator

import keras
import numpy as np
import pytest

import tfgpipe
from tfgpipe import remat as remat_lib
from tfgpipe import schedules
from tfgpipe.costs import LayerBytes, LayerCost, PassCost, StageBytes, Weights, tables
from tfgpipe.costs import stage_bytes as bytes_of_stage
from tfgpipe.partition import balances
from tfgpipe.partition.plans import Plan, best_plan
from tfgpipe.partition.profiles import CallProfile, PlanSettings
from tfgpipe.stage import codecs


def settings(schedule: schedules.Schedule, remat: str) -> PlanSettings:
    return PlanSettings(
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        remat=remat_lib.find(remat),
        memory_limit=None,
        num_slots=2,
        codec=codecs.find(None),
        schedule=schedule,
        order=schedule,
    )


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [
        (schedules.gpipe(2, 4), (3, 3)),
        (schedules.one_f_one_b(2, 4), (3, 0)),
        (schedules.one_f_one_b(3, 4), (3, 3, 0)),
        (schedules.find("zero_bubble")(2, 4), (3, 0)),
        (schedules.gpipe(1, 1), (0,)),
    ],
)
def test_what_is_recomputed_is_counted_as_it_is_run(schedule, counts):
    """The last microbatch is kept, and those whose backward follows at once."""
    M = schedule.num_microbatches
    found = settings(schedule, "except_last").load.kept
    assert found == tuple(M - count for count in counts)
    for remat, fraction in {"none": 0, "stage": 1, "layer": 1}.items():
        fractions = settings(schedule, remat).load.recomputed_fractions
        assert fractions == (fraction,) * schedule.num_stages


@dataclasses.dataclass(frozen=True)
class _Own(remat_lib.Remat):
    keeps_all: bool = False
    length: int = 2

    def segment(self, num_layers):
        return self.length


@pytest.mark.parametrize(
    "remat", [*map(remat_lib.find, remat_lib.NAMES), _Own(True, 2), _Own(False, 3)]
)
def test_tables_of_all_stages_are_what_the_policy_says_of_each(remat):
    saved, inputs, forward = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5.0, 8.0, 9.0, 7.0, 9.0]
    layers = [
        LayerBytes(weights=n, trained=n - 1, saved=a, inputs=b, received=b, kept=a / 2)
        for n, (a, b) in enumerate(zip(saved, inputs, strict=True), 1)
    ]
    received = np.zeros((6, 6))
    received[:-1] = np.array(inputs)[:, None]
    found = tables.stage_byte_tables([layers], remat, received)
    repeats = tables.weighted_range_sums(forward, remat.recomputed)
    for s, e in itertools.combinations(range(6), 2):
        assert found.at(s, e) == bytes_of_stage(layers[s:e], remat)
        counts = remat.recomputed(e - s)
        expected = sum(map(operator.mul, counts, forward[s:e]))
        assert repeats[s, e] == pytest.approx(expected)


def test_stages_of_one_device_share_the_largest_workspace():
    """Of two shards, four stages on two devices."""

    def stage(resident, recomputed):
        each = np.array(resident), np.array(recomputed)
        return StageBytes(
            weights=each[0], trained=0, inputs=0, saved=0, recomputed=each[1]
        )

    stages = [
        stage([10, 1], [100, 7]),
        stage([20, 2], [200, 8]),
        stage([30, 3], [300, 9]),
        stage([40, 4], [50, 500]),
    ]
    load = settings(schedules.gpipe(4, 2, num_devices=2), "stage").load
    held = load.device_memory(stages, num_slots=2)
    # Weights add up; of what is recomputed there is that of one stage at a time.
    assert [tuple(x.total) for x in held] == [(40 + 300, 4 + 9), (60 + 200, 6 + 500)]


def test_memory_is_of_what_is_decoded():
    layers = [keras.layers.Dense(8) for _ in range(3)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    plain, compressed = (
        tfgpipe.plan(
            model, num_stages=3, num_microbatches=4, transfer_dtype=dtype
        ).device_bytes
        for dtype in (None, "bfloat16")
    )
    assert compressed == plain


def by_hand() -> CallProfile:
    """Returns four calls in two shards, with a skip from the first to the last."""
    held = np.zeros((5, 5))
    held[0, 1:] = 10  # An input of the model.
    # [s, e]: what a stage of the calls from s to before e gets from those before.
    held[1, 2:] = [7, 7, 7]
    held[2, 3:] = [6, 6 + 7]
    held[3, 4] = 4 + 7
    received = held / 2  # Compressed.
    received[0] = 0
    saved, inputs = ((100, 90), (30, 0), (50, 50), (70, 0)), (10, 20, 5, 15)
    weights = ((40, 20), (8, 0), (20, 10), (12, 0))
    trained = ((40, 20), (0, 0), (16, 10), (12, 0))
    return CallProfile(
        flow=schedules.DataFlow(((), (0,), (1,), (0, 2))),
        layers=tuple(
            LayerCost(
                name=name,
                weights=Weights(count),
                flops=PassCost(*flops),
                seconds=PassCost(*seconds),
            )
            for name, count, flops, seconds in zip(
                "abcd",
                (20, 2, 9, 3),
                [(10, 20), (1, 3), (5, 10), (2, 4)],
                [(1, 5), (1, 5), (1, 1), (3, 1)],
                strict=True,
            )
        ),
        shards=tuple(
            tuple(
                LayerBytes(
                    weights=weights[i][t],
                    trained=trained[i][t],
                    saved=saved[i][t],
                    inputs=0 if t else inputs[i],
                )
                for i in range(4)
            )
            for t in range(2)
        ),
        received_bytes=received,
        held_bytes=held,
        num_examples=2,
    )


# Weights, a gradient and two slots: 160 + 8 and 20 + 3 * 16 + 48 on the first shard, 80
# and 40 on the second. GPipe has all three microbatches in flight, 1F1B two and one.
BY_HAND = {
    ("gpipe", "none"): [(168 + 3 * 140, 80 + 3 * 90), (116 + 3 * 133, 40 + 3 * 50)],
    ("1f1b", "none"): [(168 + 2 * 140, 80 + 2 * 90), (116 + 1 * 133, 40 + 1 * 50)],
    ("gpipe", "stage"): [
        (168 + 3 * 10 + 130, 80 + 90),
        (116 + 3 * 13 + 120, 40 + 50),
    ],
    # The input of the second call, and what the larger one saves.
    ("gpipe", "layer"): [
        (168 + 3 * 10 + 20 + 100, 80 + 90),
        (116 + 3 * 13 + 15 + 70, 40 + 50),
    ],
    # The second stage begins two backwards before it ends one.
    ("zero_bubble", "stage"): [
        (168 + 2 * 10 + 130, 80 + 90),
        (116 + 2 * 13 + 2 * 120, 40 + 2 * 50),
    ],
}


@pytest.mark.parametrize(("name", "remat"), BY_HAND)
def test_memory_of_a_stage_is_that_added_up_by_hand(name, remat):
    schedule = schedules.make(name, num_stages=2, num_microbatches=3)
    asked, expected = settings(schedule, remat), BY_HAND[name, remat]
    stages = by_hand().stage_bytes(asked.remat)
    for k, (start, end) in enumerate([(0, 2), (2, 4)]):
        stage = asked.load.stage_memory(k, stages.at(start, end), num_slots=2)
        assert tuple(stage.total) == expected[k]
        table = by_hand().stage_memory_tables(asked)[k]
        assert table[start, end] == max(expected[k])
    assert by_hand().device_bytes(asked, [2, 2]) == tuple(map(max, expected))


@pytest.mark.parametrize(
    ("remat", "expected"),
    [
        # When a device has most in flight, they are three of stage 0 and two of stage
        # 2, two of stage 1 and one of stage 3.
        ("none", (160 + 3 * 110 + 68 + 2 * (6 + 50), 8 + 2 * (7 + 30) + 48 + 11 + 70)),
        ("stage", (160 + 3 * 10 + 68 + 2 * 6 + 100, 8 + 2 * 7 + 48 + 11 + 70)),
    ],
)
def test_memory_of_interleaved_stages_is_that_added_up_by_hand(remat, expected):
    schedule = schedules.interleaved(4, 3, num_devices=2)
    found = by_hand().device_bytes(settings(schedule, remat), [1] * 4)
    assert found == expected


@pytest.mark.parametrize(
    ("name", "remat", "flops", "seconds"),
    [
        ("gpipe", "none", (34, 21), (12, 6)),
        ("gpipe", "stage", (34 + 11, 21 + 7), (12 + 2, 6 + 4)),
        # The first call's forward twice, the second's once.
        ("gpipe", "layer", (34 + 2 * 10 + 1, 21 + 2 * 5 + 2), (12 + 3, 6 + 2 + 3)),
        ("gpipe", "except_last", (34 + 22 / 3, 21 + 14 / 3), (12 + 4 / 3, 6 + 8 / 3)),
        ("1f1b", "except_last", (34 + 22 / 3, 21), (12 + 4 / 3, 6)),
    ],
)
def test_stages_of_a_plan_cost_what_their_calls_do(name, remat, flops, seconds):
    schedule = schedules.make(name, num_stages=2, num_microbatches=3)
    for quantity, expected in {
        "flops": flops,
        "time": seconds,
        "params": (22, 12),
    }.items():
        balance = balances.find(quantity)
        plan = Plan((2, 2), balance, settings(schedule, remat), "by hand", by_hand())
        assert [stage.cost for stage in plan.stages] == pytest.approx(expected)
        assert [stage.flops for stage in plan.stages] == pytest.approx(flops)
        assert [stage.parameters for stage in plan.stages] == [22, 12]
        assert [stage.received_bytes for stage in plan.stages] == [0, 13 / 2]
        mean = sum(expected) / 2
        assert plan.imbalance == pytest.approx(max(expected) / mean)


def test_the_best_plan_is_that_found_by_hand():
    """Of the three partitions with "layer", by FLOPs, memory and parameters."""
    order = schedules.gpipe(2, 3)
    plans = {
        quantity: best_plan(
            by_hand(), balances.find(quantity), settings(order, "layer"), note=""
        ).calls_per_stage
        for quantity in ("flops", "memory", "params", "time")
    }
    # FLOPs: 40 and 4 + 15 + 6 + 2 + 10 + 2 = 39; 55 and 33; 67 and 8. Memory: 270 and
    # 8 + 116 + 21 + 40 + 70 = 255; 298 and 245; 371 and 48 + 33 + 85. Parameters: 20
    # and 14; 22 and 12; 31 and 3. Seconds: 7 and 19; 15 and 11; 18 and 7.
    assert plans == {
        "flops": (1, 3),
        "memory": (1, 3),
        "params": (1, 3),
        "time": (2, 2),
    }


def test_only_measured_times_may_be_a_little_worse_for_fewer_bytes():
    layers = tuple(
        dataclasses.replace(layer, flops=PassCost(0, cost), seconds=PassCost(0, cost))
        for layer, cost in zip(by_hand().layers, (30, 0.1, 29, 0.2), strict=True)
    )
    received = np.zeros((5, 5))
    received[1, 2:], received[2, 3:], received[3, 4:] = 1000, 1, 1
    profile = dataclasses.replace(by_hand(), layers=layers, received_bytes=received)
    order = settings(schedules.gpipe(2, 3), "none")
    found = {
        quantity: best_plan(
            profile, balances.find(quantity), order, note=""
        ).calls_per_stage
        for quantity in ("flops", "time")
    }
    # 30 and 29.3, with 1000 bytes; 30.1 and 29.2, with 1.
    assert found == {"flops": (1, 3), "time": (2, 2)}


def test_measured_times_are_spread_over_calls_by_their_costs():
    """With recomputation: 3 * 10 + 20 and 3 + 3, 3 * 5 + 10 and 3 * 2 + 4."""
    order = settings(schedules.gpipe(2, 3), "layer")
    plan = Plan((2, 2), balances.flops, order, "by hand", by_hand())
    after = plan.rebalance([0.56, 0.35])
    assert after.calls_per_stage == (1, 3)
    assert [stage.cost for stage in after.stages] == pytest.approx([0.5, 0.41])


def test_a_partition_for_stages_on_one_device_is_the_best_that_fits():
    """All in all 1,034 bytes, and three times what the second stage receives."""
    held = by_hand().held_bytes.copy()
    held[0], held[1, 4], held[2, 4], held[3, 4] = 0, 7, 9, 13
    profile = dataclasses.replace(
        by_hand(),
        held_bytes=held,
        layers=tuple(
            dataclasses.replace(each, weights=Weights(n))
            for each, n in zip(by_hand().layers, (3, 3, 3, 8), strict=True)
        ),
    )

    def best(quantity, limit):
        asked = settings(schedules.gpipe(2, 3, num_devices=1), "none")
        asked = dataclasses.replace(asked, memory_limit=limit)
        return best_plan(
            profile, balances.find(quantity), asked, note=""
        ).calls_per_stage

    # The largest stage has 9, 11 or 14 parameters.
    assert best("params", None) == best("params", 1034 + 39) == (3, 1)
    assert best("params", 1034 + 38) == best("params", 1034 + 27) == (2, 2)
    assert best("params", 1034 + 26) == best("memory", 1034 + 21) == (1, 3)
    assert best("memory", None) == (1, 3)
    with pytest.raises(ValueError, match="leanest partition found needs 1,055 bytes"):
        best("memory", 1034 + 20)
