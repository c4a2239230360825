"""Checks of arguments that several public functions take."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

# Arguments of other libraries, and the hint for those who pass them.
_HINTS = {
    "chunks num_chunks n_microbatches num_micro_batches microbatches": (
        "Use `num_microbatches`."
    ),
    "micro_batch_size microbatch_size": (
        "Use `num_microbatches`: the batch size divided by that of a microbatch."
    ),
    "num_partitions stages n_stages num_pipeline_stages": "Use `num_stages`.",
    "split_spec split_points": (
        "Use `partition`, with the names of the layers that end each stage but the "
        "last."
    ),
    "checkpoint recompute": (
        'Use `remat`: "stage" for torchgpipe\'s "always", "except_last", or "none" for '
        '"never".'
    ),
    "schedule": (
        "Use `tfgpipe.PipelinedModel`, or `tfgpipe.pipeline(model, ...)`: schedules "
        "beyond GPipe's need the loss inside the pipeline."
    ),
    "loss_fn": "Use `tfgpipe.PipelinedModel`, and `compile(loss=...)`.",
}
_ARGUMENTS_ELSEWHERE = {
    x: hint for names, hint in _HINTS.items() for x in names.split()
}


def check_argument_names(arguments: Mapping[str, Any]) -> None:
    """Raises TypeError if an argument has its name in another library.

    Python's own error would name the missing argument instead.
    """
    for name, value in arguments.items():
        if name in _ARGUMENTS_ELSEWHERE:
            raise TypeError(
                "An argument has another name here, or another place. Received "
                f"{name}={value!r}. {_ARGUMENTS_ELSEWHERE[name]}"
            )


def check_count(
    argument: str, value: Any, *, least: int = 1, most: int = 2**20, hint: str = ""
) -> int:
    """Returns an integer argument within limits as an int.

    Args:
        argument: The argument's name.
        value: The value received, of any type; NumPy's integers are integers.
        least: The smallest value allowed.
        most: The largest value allowed.
        hint: A sentence with what to try, after a space.

    Raises:
        ValueError: If it is no integer, or is outside the limits.
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or not least <= value <= most:
        above = f" and at most {most:,}" if is_integer and value > most else ""
        raise ValueError(
            f"`{argument}` must be an integer of at least {least}{above}. Received "
            f"{value!r}.{hint}"
        )
    return int(value)


def check_num_microbatches(num_microbatches: Any) -> int:
    """Returns M if it is a positive integer."""
    hint = " Four times the number of stages is a good start."
    return check_count("num_microbatches", num_microbatches, hint=hint)


def check_schedule_size(num_stages: int, num_microbatches: int) -> None:
    """Raises ValueError for counts of which no schedule can be made.

    At most 2^20 pairs of a stage and a microbatch: a step has operations for each.
    """
    check_count("num_stages", num_stages)
    check_num_microbatches(num_microbatches)
    if num_stages * num_microbatches > 2**20:
        raise ValueError(
            "A schedule has at most 1,048,576 forwards, num_stages x num_microbatches. "
            f"Received num_stages={num_stages} and num_microbatches={num_microbatches}."
            " Use fewer microbatches: four times the number of stages is a good start."
        )


def check_instance(argument: str, value: Any, kind: type, *, hint: str = "") -> None:
    """Raises TypeError for an argument of another type."""
    if not isinstance(value, kind):
        raise TypeError(
            f"`{argument}` must be a {kind.__name__}. Received {value!r} of type "
            f"{type(value).__name__}.{hint}"
        )


def check_device_names(devices: Any) -> tuple[str, ...] | None:
    """Returns an argument `devices` as a tuple of names, or None if it is None."""
    if devices is None:
        return None
    is_list = isinstance(devices, Sequence) and not isinstance(devices, str)
    if not is_list or not all(isinstance(name, str) for name in devices):
        raise TypeError(
            "`devices` must be a list of device names, one for each stage. Received "
            f'{devices!r}. Write for example devices=["GPU:0", "GPU:1"].'
        )
    return tuple(devices)


def check_memory_limit(memory_limit: Any) -> float | None:
    """Returns an argument `memory_limit` if it is None or a number of bytes."""
    if memory_limit is None:
        return None
    is_number = isinstance(memory_limit, numbers.Real)
    if not is_number or not 0 < memory_limit < math.inf:
        raise ValueError(
            "`memory_limit` must be a number of bytes above 0, or None for no limit. "
            f"Received {memory_limit!r}. One GiB is 2**30."
        )
    return memory_limit


def check_choice(
    argument: str, value: Any, choices: Sequence[Any], *, hint: str = ""
) -> Any:
    """Returns the value of an argument if it is one of the choices."""
    if value not in choices:
        expected = ", ".join(map(repr, choices))
        raise ValueError(
            f"`{argument}` must be one of {expected}. Received {value!r}.{hint}"
        )
    return value
