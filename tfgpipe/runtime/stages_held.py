"""What the stages of each device hold in a step, for policies that choose by memory."""

from __future__ import annotations

from collections.abc import Sequence

from tfgpipe._util import num_bytes
from tfgpipe.remat import DeviceStages
from tfgpipe.schedules import Schedule
from tfgpipe.stage import Stage, TracedStage

# Optimizer slots of a trained weight: Adam's, as in plans.
_NUM_SLOTS = 2


def device_stages(
    stages: Sequence[Stage],
    traced: Sequence[TracedStage],
    schedule: Schedule,
    *,
    sizes_known: bool,
) -> list[DeviceStages]:
    """Returns the stages of each device. Shards of a stage count as on one device.

    Args:
        stages: The stages.
        traced: The same, traced.
        schedule: The order of the actions.
        sizes_known: True if the number of examples of a microbatch is known.
    """

    def fixed_bytes(k: int) -> float:
        trace = traced[k].trace
        inputs = sum(num_bytes(trace.spec(x)) for x in trace.given.inputs)
        trained = sum(map(num_bytes, stages[k].weights))
        weights = trained + sum(map(num_bytes, stages[k].state))
        return weights + (1 + _NUM_SLOTS) * trained + schedule.in_flight[k] * inputs

    def on_device(p: int) -> DeviceStages:
        mine = [k for k, q in enumerate(schedule.placement) if q == p]
        return DeviceStages(
            graphs={k: traced[k].forward_graph for k in mine},
            in_flight={k: schedule.in_flight[k] for k in mine},
            in_backward={k: schedule.in_backward[k] for k in mine},
            splits_backwards=schedule.splits_backwards,
            fixed_bytes=sum(map(fixed_bytes, mine)) if sizes_known else None,
        )

    return [on_device(p) for p in range(max(schedule.placement) + 1)]
