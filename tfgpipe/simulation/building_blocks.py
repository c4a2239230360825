"""Orders that repeat a building block: the passes of one microbatch, a period apart.

The passes of a microbatch are put on the time line of their devices, each as early as
can be where it does not meet those of the microbatches before and after, which are the
same a period earlier and later. So in the middle of a step a device idles for no longer
than it has to, however many microbatches there are, and holds those whose passes span
the period: the longer it is, the fewer. At both ends devices run what they have ahead
of its time. The blocks are those of Qi et al. 2024 ("Pipeline Parallelism with
Controllable Memory", arXiv 2405.15362, section 3), for stages of any lengths; they are
placed as in modulo scheduling (Rau 1994, "Iterative Modulo Scheduling").
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from tfgpipe.simulation.shop import BACKWARD, FORWARD, TOLERANCE, WEIGHT, Run, Shop

# Periods that are tried first, over the least, and periods by which a device may run a
# pass ahead of its time.
_PERIODS = (1.0, 1.1, 1.3, 1.6)
_AHEAD = (1.0, 4.0, math.inf)
_MOST_BLOCKS = 300


class Timed(Protocol):
    """Something that has the time of a step."""

    @property
    def time(self) -> float:
        """Seconds."""


_T = TypeVar("_T", bound=Timed)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A building block, by the choices that it is made from.

    Attributes:
        period: Seconds from a microbatch to the next, over the busiest device's work.
        ahead: Periods by which a device may run a pass ahead of its time.
        weights_last: True if gradients of weights are placed after all other passes.
        delays: Seconds by which passes are placed later, by kind and stage.
    """

    period: float
    ahead: float
    weights_last: bool
    delays: tuple[tuple[tuple[int, int], float], ...] = ()


def best_of_blocks(
    shop: Shop, make: Callable[[Run], _T | None], effort: int
) -> _T | None:
    """Returns the best schedule that repeats a block, or None if none is found.

    Those of a few periods, then changes of the best as long as they help.

    Args:
        shop: The devices and passes.
        make: Returns the schedule of a run, or None if it lacks memory.
        effort: Number of passes that may be simulated.
    """
    draw, best, chosen = random.Random(0), None, None
    left, pending = min(effort // shop.num_passes, _MOST_BLOCKS), _first(shop)
    while left and (best is None or best.time > shop.lower_bound * (1 + TOLERANCE)):
        block = next(pending, None)
        if block is None:
            if chosen is None:
                break
            block = _changed(chosen, shop, draw)
        left -= 1
        run = _run(shop, block)
        found = None if run is None else make(run)
        if found is not None and (best is None or found.time <= best.time):
            best, chosen = found, block
    return best


def _first(shop: Shop) -> Iterator[_Block]:
    """Yields the blocks that are tried first."""
    for period in _PERIODS:
        for ahead in _AHEAD:
            for weights_last in (False, True)[: 1 + shop.splits]:
                yield _Block(period, ahead, weights_last)


def _changed(block: _Block, shop: Shop, draw: random.Random) -> _Block:
    """Returns a block with one choice changed at random."""
    what = draw.random()
    if what < 0.2:
        period = max(block.period * draw.choice((0.97, 0.99, 1.01, 1.03, 1.1)), 1.0)
        return dataclasses.replace(block, period=period)
    if what < 0.3:
        return dataclasses.replace(block, ahead=draw.choice((0.5, 2.0, *_AHEAD)))
    if what < 0.35 and shop.splits:
        return dataclasses.replace(block, weights_last=not block.weights_last)
    delays = dict(block.delays)
    which = draw.randrange(len(shop.kinds)), draw.randrange(len(shop.placement))
    if which in delays and draw.random() < 0.4:
        del delays[which]
    else:
        longest = draw.choice((0.2, 1.0, 2.0)) * _least_period(shop)
        delays[which] = draw.random() * longest
    return dataclasses.replace(block, delays=tuple(delays.items()))


def _least_period(shop: Shop) -> float:
    """Returns the seconds that the busiest device works for a microbatch."""
    return max(shop.work) / shop.M


def _run(shop: Shop, block: _Block) -> Run | None:
    """Returns a step of repeated blocks, or None if there is none."""
    period = block.period * _least_period(shop)
    times = _times(shop, block, period)
    if times is None:
        return None
    run = Run(shop)

    def rank(kind: int, k: int, start: float) -> tuple[float, ...]:
        own = times[kind, k] + period * run.done[kind][k]
        return max(start, own - block.ahead * period), own

    return run if run.finish(rank) else None


def _times(
    shop: Shop, block: _Block, period: float
) -> dict[tuple[int, int], float] | None:
    """Returns the start of each pass of the first microbatch, if there is room."""
    stages, flow = range(len(shop.placement)), shop.flow
    weights = [WEIGHT] if shop.splits else []
    order = [(FORWARD, k) for k in stages]
    for some in (
        ([BACKWARD], weights) if block.weights_last else ([BACKWARD, *weights],)
    ):
        order += [(kind, k) for k in reversed(stages) for kind in some]
    delays = dict(block.delays)
    busy: list[list[tuple[float, float]]] = [[] for _ in shop.stages]
    starts: dict[tuple[int, int], float] = {}
    ends: dict[tuple[int, int], float] = {}
    for kind, k in order:
        if kind == FORWARD:
            needed = [ends[kind, j] + shop.delay(j, k) for j in flow.sources[k]]
        else:
            needed = [ends[kind - 1, k]]
        if kind == BACKWARD:
            needed += [ends[kind, j] + shop.delay(k, j) for j in flow.targets[k]]
        ready = max(needed, default=0.0) + delays.get((kind, k), 0.0)
        length, taken = shop.work_of(kind, k), busy[shop.placement[k]]
        start = _first_gap(taken, ready, length, period)
        if start is None:
            return None
        starts[kind, k], ends[kind, k] = start, start + length
        taken.append((start % period, start % period + length))
    return starts


def _first_gap(
    taken: list[tuple[float, float]], ready: float, length: float, period: float
) -> float | None:
    """Returns the first time from which a device is free for so long in all periods.

    Args:
        taken: Begin and end of what it runs in each period.
        ready: The earliest time.
        length: Seconds.
        period: Seconds.
    """
    start, slack = ready, TOLERANCE * period
    while start <= ready + period:
        begin = start % period
        met = [
            end + shift - begin
            for first, end in taken
            for shift in (-period, 0.0, period)
            if begin < end + shift - slack and begin + length > first + shift + slack
        ]
        if not met:
            return start
        start += max(met)
    return None
