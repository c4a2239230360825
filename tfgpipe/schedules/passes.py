"""Passes: schedules made of schedules, with more actions."""

from __future__ import annotations

import dataclasses

from tfgpipe.schedules.kinds import ActionKind
from tfgpipe.schedules.schedule import Action, Schedule


def insert_before(
    schedule: Schedule, kind: ActionKind, *others: ActionKind
) -> Schedule:
    """Returns a schedule with an action of one kind before each of others.

    It is of the same stage and microbatch.

    Args:
        schedule: The schedule.
        kind: The kind to insert.
        *others: The kinds to insert it before.
    """

    def inserted(order: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(
            each
            for action in order
            for each in (
                (action.of(kind), action) if action.kind in others else (action,)
            )
        )

    return dataclasses.replace(schedule, orders=tuple(map(inserted, schedule.orders)))
