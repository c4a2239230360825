"""The named schedules: GPipe, 1F1B, interleaved 1F1B, zero bubble."""

from __future__ import annotations

from typing import Literal, get_args

from tfgpipe._util import argument_checks
from tfgpipe.schedules.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
)
from tfgpipe.schedules.schedule import Action, Schedule

# The name of a schedule.
Name = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
NAMES: tuple[Name, ...] = get_args(Name)
"""The names of all schedules."""


def gpipe(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None
) -> Schedule:
    """Returns GPipe's fill-drain schedule (Huang et al. 2019, figure 2c).

    All forwards, then all backwards, the last microbatch first. For K=4, M=8:

        stage 0  F0 F1 F2 F3 F4 F5 F6 F7 .. .. .. .. .. .. B7 B6 B5 B4 B3 B2 B1 B0
        stage 1  .. F0 F1 F2 F3 F4 F5 F6 F7 .. .. .. .. B7 B6 B5 B4 B3 B2 B1 B0 ..
        stage 2  .. .. F0 F1 F2 F3 F4 F5 F6 F7 .. .. B7 B6 B5 B4 B3 B2 B1 B0 .. ..
        stage 3  .. .. .. F0 F1 F2 F3 F4 F5 F6 F7 B7 B6 B5 B4 B3 B2 B1 B0 .. .. ..

    Args:
        num_stages: K.
        num_microbatches: M, any number.
        num_devices: P, which divides K. Stage k is on device k modulo P.
    """
    M = num_microbatches
    argument_checks.check_schedule_size(num_stages, M)
    stages = _round_robin(num_stages, num_devices)
    orders = tuple(
        tuple(Action(FORWARD, k, m) for k in mine for m in range(M))
        + tuple(
            Action(BACKWARD, k, m) for k in reversed(mine) for m in reversed(range(M))
        )
        for mine in stages
    )
    return Schedule(num_stages, M, orders, "gpipe")


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns 1F1B: as many forwards as it takes, then a backward after each.

    PipeDream-flush (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN
    Training", section 2.2; Megatron-LM, Narayanan et al. 2021, section 2.2.1). The
    bubble is GPipe's, but stage k never holds more than K - k microbatches. For K=4,
    M=8:

        stage 0  F0 F1 F2 F3 .. .. .. B0 F4 B1 F5 B2 F6 B3 F7 B4 .. B5 .. B6 .. B7
        stage 1  .. F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .. B6 .. B7 ..
        stage 2  .. .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .. B7 .. ..
        stage 3  .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 .. .. ..

    Args:
        num_stages: K, one a device.
        num_microbatches: M, at least K.

    Raises:
        ValueError: If M is below K.
    """
    K, M = num_stages, num_microbatches
    argument_checks.check_schedule_size(K, M)
    _check_num_microbatches("1f1b", M, K)
    orders = tuple(
        _alternate(
            [Action(FORWARD, k, m) for m in range(M)],
            [Action(BACKWARD, k, m) for m in range(M)],
            num_warmup=K - k,
        )
        for k in range(K)
    )
    return Schedule(K, M, orders, "1f1b")


def interleaved(
    num_stages: int, num_microbatches: int, *, num_devices: int
) -> Schedule:
    """Returns 1F1B over several stages a device, which divides the bubble by v.

    Megatron-LM (Narayanan et al. 2021, section 2.2.2). Device p runs the stages p,
    p + P, p + 2 P, ...: microbatches pass all devices v times, P of them at a time. For
    K=4 stages on P=2 devices, M=8:

        device 0  F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a F4a B2b F5a B3b F4b B2a F5b B3a F6a B4b F7a B5b F6b B4a F7b B5a ... B6b ... B7b B6a B7a
        device 1  ... F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b F4a B2a F5a B3a F4b B4b F5b B5b F6a B4a F7a B5a F6b B6b F7b B7b B6a B7a ...

    Args:
        num_stages: K, a multiple of P.
        num_microbatches: M, at least P. Multiples of P have the least bubble.
        num_devices: P.

    Raises:
        ValueError: If P does not divide K, or M is below P.
    """  # noqa: E501
    K, M, P = num_stages, num_microbatches, num_devices
    argument_checks.check_schedule_size(K, M)
    stages = _round_robin(K, P)
    _check_num_microbatches("interleaved", M, P)
    if K == P:
        return Schedule(K, M, one_f_one_b(K, M).orders, "interleaved")
    v = K // P
    # Full groups, of which the last may hold microbatches that there are not. Without
    # these a small last group would deadlock.
    groups = [range(start, start + P) for start in range(0, M, P)]
    orders = tuple(
        _alternate(
            [Action(FORWARD, k, m) for g in groups for k in mine for m in g],
            [Action(BACKWARD, k, m) for g in groups for k in mine[::-1] for m in g],
            num_warmup=2 * (P - 1 - p) + (v - 1) * P + 1,
        )
        for p, mine in enumerate(stages)
    )
    full = Schedule(K, len(groups) * P, orders, "interleaved")
    return full.first_microbatches(M)


def zero_bubble(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns ZB-H1: 1F1B that fills the bubble with gradients of weights.

    Qi et al. 2024 ("Zero Bubble Pipeline Parallelism", section 2.1). `B` computes the
    gradients of the inputs alone, which the stage before waits for; `W`, those of the
    weights, comes when there is time: k microbatches later on stage k, so that no
    stage holds more than K. Where F, B and W take f, b and w, each device waits for
    (K - 1) (f + b - min(f, b, w)): the paper's (K - 1) (f + b - w), unless w is longer
    than f or b. For K=4, M=8:

        stage 0  F0 F1 F2 F3 .. .. .. B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
        stage 1  .. F0 F1 F2 .. .. B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
        stage 2  .. .. F0 F1 .. B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
        stage 3  .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7

    Args:
        num_stages: K, one a device.
        num_microbatches: M, at least K.

    Raises:
        ValueError: If M is below K.
    """  # noqa: E501
    K, M = num_stages, num_microbatches
    argument_checks.check_schedule_size(K, M)
    _check_num_microbatches("zero_bubble", M, K)
    orders = []
    for k in range(K):
        order: list[Action] = []
        for action in _alternate(
            [Action(FORWARD, k, m) for m in range(M)],
            [Action(BACKWARD_INPUT, k, m) for m in range(M)],
            num_warmup=K - k,
        ):
            order.append(action)
            late = action.microbatch - k
            if action.kind.is_backward and late >= 0:
                order.append(Action(BACKWARD_WEIGHT, k, late))
        rest = range(max(M - k, 0), M)
        orders.append((*order, *(Action(BACKWARD_WEIGHT, k, m) for m in rest)))
    return Schedule(K, M, tuple(orders), "zero_bubble")


def _round_robin(num_stages: int, num_devices: int | None) -> list[range]:
    """Returns the stages of each device, dealt round robin."""
    P = num_stages
    if num_devices is not None:
        P = argument_checks.check_count("num_devices", num_devices)
    if num_stages % P:
        raise ValueError(
            "Stages are dealt to devices round robin, as many to each. Received "
            f"{num_stages} stages for {P} devices. Make `num_stages` a multiple of the "
            "devices, or name fewer `devices`."
        )
    return [range(p, num_stages, P) for p in range(P)]


def _alternate(
    forwards: list[Action], backwards: list[Action], *, num_warmup: int
) -> tuple[Action, ...]:
    """Returns forwards with a backward after each from `num_warmup` forwards on."""
    order = forwards[: num_warmup - 1]
    for forward, backward in zip(forwards[num_warmup - 1 :], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[max(len(forwards) - num_warmup + 1, 0) :])


def _check_num_microbatches(name: str, num_microbatches: int, num_devices: int) -> None:
    if num_microbatches < num_devices:
        raise ValueError(
            f"Schedule '{name}' needs at least as many microbatches as there are "
            f"devices. Received num_microbatches={num_microbatches} for {num_devices} "
            f"devices. Use num_microbatches={num_devices} or more, or "
            'schedule="gpipe", which takes any number.'
        )


def make(
    name: str, *, num_stages: int, num_microbatches: int, num_devices: int | None = None
) -> Schedule:
    """Returns the schedule of a name.

    >>> tfgpipe.schedules.make("1f1b", num_stages=2, num_microbatches=4).name
    '1f1b'

    Args:
        name: One of `NAMES`.
        num_stages: K.
        num_microbatches: M.
        num_devices: P, or None for K.

    Raises:
        ValueError: If there is none of this name, or none for these numbers.
    """
    K, M = num_stages, num_microbatches
    P = K if num_devices is None else num_devices
    if name not in NAMES:
        raise ValueError(
            f"`schedule` must be one of {', '.join(map(repr, NAMES))}, or a "
            f"`tfgpipe.Schedule` of your own. Received {name!r}."
        )
    if name == "gpipe":
        return gpipe(K, M, num_devices=P)
    if name == "interleaved":
        return interleaved(K, M, num_devices=P)
    if K != P:
        raise ValueError(
            f"Schedule '{name}' has one stage a device. Received {K} stages for {P} "
            'devices. Use schedule="interleaved", which places several on each.'
        )
    return one_f_one_b(K, M) if name == "1f1b" else zero_bubble(K, M)
