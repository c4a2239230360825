"""Costs of stages that a partition minimises, as values."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np
import pytest

from tfgpipe import remat, schedules
from tfgpipe.costs import LayerCost, PassCost, StepLoad, TensorBytes, Weights
from tfgpipe.partition import balances

pytestmark = pytest.mark.pure

LAYERS = tuple(
    LayerCost(
        name=f"layer_{i}",
        weights=Weights(count),
        flops=PassCost(10.0 * i, 20.0),
        seconds=PassCost(1.0 + i, 3.0),
        tensors=TensorBytes(saved=5 * i),
    )
    for i, count in enumerate((7, 3, 0, 5))
)


@dataclasses.dataclass(frozen=True)
class Saved(balances.Balance):
    """Bytes of activations, and as much again wherever they are recomputed."""

    factor: float = 1.0

    def layer_cost(self, layer: LayerCost) -> float:
        return self.factor * layer.tensors.saved

    def recomputed_cost(self, layer: LayerCost) -> float:
        return layer.tensors.saved


def asked(name: str, policy: str, speeds: tuple[float, float] = (1, 1)) -> Any:
    schedule = schedules.make(name, num_stages=2, num_microbatches=3)
    return types.SimpleNamespace(
        load=StepLoad.of(schedule, remat.find(policy)),
        num_stages=2,
        speed=speeds.__getitem__,
    )


PROFILE: Any = types.SimpleNamespace(layers=LAYERS)


def test_a_name_is_found_once_and_a_value_is_itself() -> None:
    for name in balances.NAMES:
        found = balances.find(name)
        assert str(found) == found.name == name
        assert balances.find(found) is found
    own = Saved(2.0)
    assert balances.find(own) is own
    assert Saved.from_config(own.get_config()) == own != Saved()


@pytest.mark.parametrize("wrong", ["weights", None, 3])
def test_what_is_no_balance_is_refused_with_the_choices(wrong: Any) -> None:
    words = f"'params', 'flops', 'time', 'memory'. Received {wrong!r}. Or give a"
    with pytest.raises(ValueError, match=words):
        balances.find(wrong)


def test_layers_cost_their_weights_and_passes() -> None:
    assert {
        name: [balances.find(name).layer_cost(layer) for layer in LAYERS]
        for name in ("params", "flops", "time")
    } == {
        "params": [7, 3, 0, 5],
        "flops": [20, 30, 40, 50],
        "time": [4, 5, 6, 7],
    }


def test_only_weights_need_no_trace_and_only_time_a_device() -> None:
    found = [*map(balances.find, balances.NAMES)]
    assert [x.needs_trace for x in found] == [False, True, True, True]
    assert [x.is_measured for x in found] == [False, False, True, False]
    assert [x.is_memory for x in found] == [False, False, False, True]
    assert [x.slack > 0 for x in found] == [False, False, True, False]
    work = [x.column + " " + x.work_text(cost=0.25, flops=2e9) for x in found]
    assert work == ["FLOPs 2.0 G", "FLOPs 2.0 G", "ms 250", "FLOPs 2.0 G"]


@pytest.mark.parametrize("policy", ["none", "stage", "layer", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("balance", ["params", "flops", "time", Saved()])
@pytest.mark.parametrize("speeds", [(1, 1), (1, 0.5)])
def test_what_the_solver_takes_is_the_cost_of_each_stage(
    balance: Any, schedule: str, policy: str, speeds: tuple[float, float]
) -> None:
    value, settings = balances.find(balance), asked(schedule, policy, speeds)
    costs = value.solver_costs(PROFILE, settings)
    adds_up = isinstance(costs[0], float | int)
    # Recomputed by layers, the last is recomputed less.
    is_even = schedule == "gpipe" and policy == "except_last"
    is_even |= value.name == "params" or policy in ("none", "stage")
    assert adds_up == (is_even and speeds == (1, 1))
    for k in range(2):
        for start in range(4):
            for end in range(start + 1, 5):
                one = value.stage_cost(PROFILE, settings, k, slice(start, end))
                found: Any = costs
                found = sum(found[start:end]) if adds_up else found[k][start, end]
                np.testing.assert_allclose(found, one)
                even = value.stage_cost(
                    PROFILE, asked(schedule, policy), k, slice(start, end)
                )
                np.testing.assert_allclose(one, even / speeds[k])
