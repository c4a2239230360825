"""Checks of arguments that several public functions take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

# What other libraries call an argument, and what to use here.
_ARGUMENTS_ELSEWHERE = {
    **dict.fromkeys(
        ("chunks", "num_chunks", "n_microbatches", "num_micro_batches", "microbatches"),
        "Use `num_microbatches`.",
    ),
    **dict.fromkeys(
        ("micro_batch_size", "microbatch_size"),
        "Use `num_microbatches`: the batch size divided by that of a microbatch.",
    ),
    **dict.fromkeys(
        ("num_partitions", "stages", "n_stages", "num_pipeline_stages"),
        "Use `num_stages`.",
    ),
    **dict.fromkeys(
        ("split_spec", "split_points"),
        "Use `balance`, with the names of the layers that end each stage but the last.",
    ),
    **dict.fromkeys(
        ("checkpoint", "recompute"),
        'Use `remat`: "stage" for torchgpipe\'s "always", "except_last", or "none" for '
        '"never".',
    ),
    "schedule": "Use `tfgpipe.PipelinedModel`, or `tfgpipe.pipeline(model, ...)`: "
    "schedules beyond GPipe's need the loss inside the pipeline.",
    "loss_fn": "Use `tfgpipe.PipelinedModel`, and `compile(loss=...)`.",
}


_Call = TypeVar("_Call", bound=Callable[..., Any])


def check_argument_names(
    function: Callable[..., Any], arguments: Mapping[str, Any], *others: str
) -> None:
    """Raises TypeError for an argument name that another library uses.

    Python's own error would name the missing argument instead.

    Args:
        function: What is called.
        arguments: The keyword arguments.
        *others: Names that the function's `**kwargs` takes.
    """
    known = {*inspect.signature(function).parameters, *others}
    for name, value in arguments.items():
        if name in _ARGUMENTS_ELSEWHERE and name not in known:
            raise TypeError(
                "An argument has another name here, or another place. Received "
                f"{name}={value!r}. {_ARGUMENTS_ELSEWHERE[name]}"
            )


def checks_argument_names(*others: str) -> Callable[[_Call], _Call]:
    """Decorates a function to check the names of its arguments first."""

    def decorated(function: _Call) -> _Call:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check_argument_names(function, kwargs, *others)
            return function(*args, **kwargs)

        return cast(_Call, checked)

    return decorated


def check_num_microbatches(num_microbatches: int) -> int:
    """Returns M if it is a positive integer."""
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(
            "`num_microbatches` must be an integer of at least 1. Received "
            f"{num_microbatches!r}. Four times the number of stages is a good start."
        )
    return num_microbatches


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
