"""Checks of arguments that several public functions take."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

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


# Bytes of a device, of each of several, or None for no limit.
MemoryLimit: TypeAlias = float | tuple[float, ...] | None


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


def check_memory_limit(memory_limit: Any) -> MemoryLimit:
    """Returns an argument `memory_limit` if it is None, or bytes of all or of each."""
    checked = _positive_numbers(memory_limit)
    if checked is None and memory_limit is not None:
        raise ValueError(
            "`memory_limit` must be a number of bytes above 0, one for each device, or "
            f"None for no limit. Received {memory_limit!r}. One GiB is 2**30."
        )
    return checked


def check_device_speeds(device_speeds: Any) -> tuple[float, ...] | None:
    """Returns an argument `device_speeds` as a tuple, or None if it is None."""
    checked = _positive_numbers(device_speeds)
    if device_speeds is not None and not isinstance(checked, tuple):
        raise ValueError(
            "`device_speeds` must be a positive number for each device, or None for "
            f"equal ones. Received {device_speeds!r}. One that is half as fast as "
            "others has 0.5 where they have 1."
        )
    return checked if isinstance(checked, tuple) else None


def _positive_numbers(value: Any) -> float | tuple[float, ...] | None:
    """Returns a positive number, or several as a tuple; None for anything else."""
    if isinstance(value, list | tuple):
        return tuple(value) if value and all(map(_is_positive, value)) else None
    return value if _is_positive(value) else None


def _is_positive(value: Any) -> bool:
    """Returns whether something is a finite number above 0."""
    return isinstance(value, numbers.Real) and 0 < float(value) < math.inf


def of_each_device(
    argument: str,
    value: float | Sequence[float] | None,
    num_devices: int,
    default: float,
) -> tuple[float, ...]:
    """Returns a number of each of P devices, of one number for all or of a sequence.

    Raises:
        ValueError: If it is a sequence of another length.
    """
    if value is None or not isinstance(value, Sequence):
        return (default if value is None else value,) * num_devices
    if len(value) != num_devices:
        raise ValueError(
            f"`{argument}` has a number for each device of the stages. Received "
            f"{len(value)} for {num_devices} devices: {argument}={list(value)}."
        )
    return tuple(value)


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
