"""Gradients of weights in the slots of a schedule in which devices would wait."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence

from tfgpipe.schedules.data_flow import DataFlow
from tfgpipe.schedules.kinds import BACKWARD_INPUT, BACKWARD_WEIGHT
from tfgpipe.schedules.policy import Orders
from tfgpipe.schedules.schedule import Action, Schedule


def fill(orders: Orders, flow: DataFlow, most_held: Sequence[int]) -> Orders:
    """Returns orders of forwards and input gradients, with those of weights between.

    They run when the device would wait otherwise, or cannot hold one microbatch more,
    the earliest first. All passes take one time slot.

    Args:
        orders: For each device its forwards and input gradients.
        flow: The data flow between the stages.
        most_held: For each device the most microbatches in flight, those of all its
            stages together.
    """
    M = 1 + max((a.microbatch for order in orders for a in order), default=-1)
    schedule = Schedule(flow.num_stages, M, orders, flow=flow)
    ends: dict[Action, int] = {}
    filled: list[list[Action]] = [[] for _ in orders]
    weights: list[collections.deque[Action]] = [collections.deque() for _ in orders]
    heads, held = [0] * len(orders), [0] * len(orders)
    num_passes = 3 * sum(map(len, orders)) // 2
    for slot in itertools.count():
        before = num_passes
        for p, order in enumerate(orders):
            action = order[heads[p]] if heads[p] < len(order) else None
            if (
                action is not None
                and held[p] + action.kind.in_flight <= most_held[p]
                and all(ends.get(x, slot) < slot for x in schedule.dependencies(action))
            ):
                heads[p] += 1
                ends[action] = slot
                if action.kind == BACKWARD_INPUT:
                    weights[p].append(action.of(BACKWARD_WEIGHT))
            elif weights[p]:
                action = weights[p].popleft()
            else:
                continue
            filled[p].append(action)
            held[p] += action.kind.in_flight
            num_passes -= 1
        if not num_passes:
            return tuple(map(tuple, filled))
        assert num_passes < before, f"A device holds too few: {most_held}."
    raise AssertionError
