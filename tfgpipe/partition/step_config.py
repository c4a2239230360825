"""Choices that the order and the memory of a step depend on: those of the planner.

An option is a field that finds the value of its argument once, when it is constructed.
"""

# ruff: noqa: RUF009  (`option` returns a field.)

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from tfgpipe import remat as remat_lib
from tfgpipe._util import argument_checks
from tfgpipe.remat import Remat
from tfgpipe.schedules import Schedule, SchedulePolicy
from tfgpipe.simulation import find_schedule

_Value = TypeVar("_Value")


def option(
    find: Callable[[Any], _Value],
    default: Any = dataclasses.MISSING,
    *,
    save: Callable[[_Value], Any] = lambda value: value,
) -> _Value:
    """Returns a field.

    Args:
        find: Returns the value of an argument, or of the value itself.
        default: The default argument.
        save: Returns the argument in a saved model.
    """
    return dataclasses.field(
        default=default, metadata={"find": find, "default": default, "save": save}
    )


def saved(function: str) -> Callable[[Any], Any]:
    """Returns a function of `saved_choices`, which loads Keras when it is called."""

    def save(value: Any) -> Any:
        from tfgpipe.partition import saved_choices

        return getattr(saved_choices, function)(value)

    return save


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Choices that the order and the memory of a step depend on.

    Attributes:
        num_stages: Number of stages, K, or None for a default.
        num_microbatches: Number of microbatches of a mini-batch, M.
        schedule: Order of forwards and backwards on each device, or its name.
        remat: Rematerialisation policy, or its name.
    """

    num_stages: int | None = option(lambda value: value, None)
    num_microbatches: int = option(argument_checks.check_num_microbatches)
    schedule: SchedulePolicy | Schedule = option(
        find_schedule, "gpipe", save=saved("save_schedule")
    )
    remat: Remat = option(remat_lib.find, "stage", save=saved("save_remat"))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if find := field.metadata.get("find"):
                value = find(getattr(self, field.name))
                object.__setattr__(self, field.name, value)
