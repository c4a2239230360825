"""Solver of the partitioning problem: splits a sequence of calls into stages.

The slowest stage determines the speed of a pipeline, so `best_partition` first
minimises the bottleneck. Many partitions have it, or nearly: among them it takes the
one that sends the fewest bytes, and among those the one with the most even stages. It
is exact, because the best way to fill k + 1 stages with the calls before e ends with
one stage [s, e) and fills k stages with the calls before s in the best way:

      0 ········ s ····· e ········ L        best[k + 1][e] =
      ╰ k stages ╯╰ one ─╯                      min over s of  best[k][s] ⊕ [s, e)

What is known about a stage is a table over (s, e), such as its cost, infinite where the
stage is not admissible. One step for all s and e at once is one numpy expression, and
there are two passes of K such steps, about a second for L = 1000 and K = 64:

1. ⊕ is the maximum, of costs: the least bottleneck.
2. ⊕ is the sum, of (bytes, squares of costs) in lexicographic order, over the stages
   that cost no more than that bottleneck. Both are sums, so the best partition begins
   with the best partition of the calls before its last stage.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
# One table for all stages, or one for each.
Tables: TypeAlias = Any

# Bottlenecks that differ by less, relatively, are the same but for rounding.
TIE_TOLERANCE = 1e-9
# How many partitions a local search looks at before it stops.
MAX_PARTITIONS = 10_000
# Weight of a stage's number of calls beside its cost when stages are evened out: enough
# to spread weightless calls, too little to move others.
CALL_WEIGHT = 1e-9


def best_partition(
    costs: Tables,
    *,
    num_stages: int,
    received_bytes: npt.ArrayLike | None = None,
    memory: Tables | None = None,
    memory_limit: float | None = None,
    may_start: Sequence[bool] | None = None,
    slack: float = 0.0,
) -> tuple[int, ...]:
    """Returns the number of calls in each stage of the best contiguous partition.

    Of the admissible ones, those come first whose bottleneck, the largest stage cost,
    is at most 1 + `slack` times the least one; of these, those whose stages receive the
    fewest bytes; of these, the one with the least sum of squared stage costs. Every
    stage gets at least one call. Calls that are all weightless cost one each.

    >>> best_partition([10, 1, 1, 1], num_stages=2)
    (1, 3)
    >>> best_partition([1, 2, 3, 4, 5, 6], num_stages=2)
    (4, 2)
    >>> best_partition([0, 0, 0, 0], num_stages=2)
    (2, 2)

    (3, 2) is as even as (2, 3), and its second stage receives less:

    >>> received_bytes = np.zeros((6, 6))
    >>> received_bytes[2, 5], received_bytes[3, 5] = 4096, 64
    >>> best_partition([1, 1, 1, 1, 1], num_stages=2, received_bytes=received_bytes)
    (3, 2)

    Args:
        costs: The cost of each of the L calls, in any unit, none negative. Where those
            of a stage's calls do not add up, an array of shape `(L + 1, L + 1)`: what a
            stage of the calls [s, e) costs at index `[s, e]`. Where stages cost
            differently, a list of K such arrays, one for each.
        num_stages: K, at least 1 and at most the number of possible stages.
        received_bytes: Array of shape `(L + 1, L + 1)`: bytes that a stage of the calls
            [s, e) receives from other stages, at index `[s, e]`. Only s < e is read.
            Integers, so that equal sums are equal. None if stages receive alike.
        memory: Array of the same shape, or a list of K: bytes that a stage of the calls
            [s, e) needs. It may grow and shrink with the stage.
        memory_limit: Bytes that one device has: no stage needs more. None for no limit.
        may_start: For each call whether a stage may start with it. The first stage
            starts with the first call in any case. None if all may.
        slack: Relative excess over the least bottleneck that is allowed if it saves
            bytes or evens out stages.

    Raises:
        ValueError: If so many stages are not possible, if no partition stays within the
            limit, or if an argument is malformed.
    """
    cost = _stage_cost_tables(costs, num_stages)
    num_calls = len(cost[0]) - 1
    if not 0 <= slack < math.inf:
        raise ValueError(
            "`slack` says how much worse than the least the bottleneck may be, as a "
            f"finite number of at least 0. Received slack={slack}. Use 0.05 for 5%."
        )
    starts = _start_mask(may_start, num_calls)
    possible = int(starts.sum())
    if not 1 <= num_stages <= possible:
        raise ValueError(
            f"`num_stages` must be at least 1, and at most {possible} stages are "
            "possible here, since every stage holds at least one call and starts where "
            f"it may. Received num_stages={num_stages} for {num_calls} calls. Use "
            "fewer stages, or split what holds them together."
        )
    stops = np.append(~starts, False)
    cost = _MappedTables(lambda c: np.where(stops[:, None], math.inf, c), cost)
    if memory_limit is not None:
        if memory is None:
            raise ValueError(
                "`memory_limit` needs `memory`, the bytes that each stage needs. "
                f"Received memory_limit={memory_limit} and memory=None. Give both, or "
                "no limit."
            )
        need = _check_tables("memory", memory, num_calls, num_stages)
        need = _MappedTables(
            lambda c, n: np.where(np.isinf(c), math.inf, n), cost, need
        )
        most = _least_bottleneck(need)
        if most > memory_limit:
            enough = math.ceil(most)
            raise ValueError(
                f"No partition into {num_stages} stages stays within `memory_limit`, "
                f"the memory of one device. Received memory_limit={memory_limit:,} "
                f"bytes; the least limit that some partition satisfies is {enough:,} "
                "bytes, "
                f"{enough - memory_limit:,} bytes more. Try more stages, more "
                "microbatches, or remat."
            )
        cost = _MappedTables(
            lambda c, n: np.where(n > memory_limit, math.inf, c), cost, need
        )
    most = _least_bottleneck(cost) * (1 + slack) * (1 + TIE_TOLERANCE)
    cost = _MappedTables(lambda c: np.where(c > most, math.inf, c), cost)
    bytes_in = np.zeros_like(cost[0])
    if received_bytes is not None:
        bytes_in = _check_table("received_bytes", received_bytes, num_calls)
    return _fewest_bytes(cost, bytes_in)


def local_search(
    counts: Sequence[int],
    objective: Callable[[tuple[int, ...]], Sequence[float]],
    *,
    may_start: Sequence[bool],
) -> tuple[int, ...]:
    """Returns the partition with the smallest objective that a local search finds.

    Boundaries are moved, one at a time or two that are neighbours, for as long as that
    helps; then from where some are moved at random, the same ones at every call.

    >>> local_search((1, 4), lambda counts: sorted(counts)[::-1], may_start=[True] * 5)
    (2, 3)

    Args:
        counts: The first partition.
        objective: Returns what is to be small, the most important first.
        may_start: For each call whether a stage may start with it.
    """
    starts = [s for s, may in enumerate(may_start) if may or not s]
    ends = [0, *itertools.accumulate(counts)]
    at = [*map(starts.index, ends[:-1]), len(starts)]  # Boundaries, as indices.
    bounds = [*starts, ends[-1]]
    known: dict[tuple[int, ...], list[float]] = {}

    def calls_per_stage(at: Sequence[int]) -> tuple[int, ...]:
        return tuple(bounds[b] - bounds[a] for a, b in itertools.pairwise(at))

    def need(at: Sequence[int]) -> list[float]:
        counts = calls_per_stage(at)
        if counts not in known:
            known[counts] = list(objective(counts))
        return known[counts]

    def descend(at: list[int]) -> list[int]:
        while True:
            best = min(_neighbours(at), key=need, default=at)
            if need(best) >= need(at):
                return at
            at = best

    best = at = descend(at)
    random = np.random.default_rng(0)
    for _ in range(30):
        if len(at) == 2 or len(known) > MAX_PARTITIONS:
            break
        inner = random.choice(np.arange(1, len(starts)), len(at) - 2, replace=False)
        keep = random.random(len(at) - 2) < 0.5
        mixed = {*np.array(best[1:-1])[keep].tolist(), *inner.tolist()}
        chosen = random.permutation(sorted(mixed))[: len(at) - 2]
        at = descend([0, *sorted(chosen.tolist()), len(starts)])
        best = min(best, at, key=need)
    return calls_per_stage(best)


def _neighbours(at: Sequence[int]) -> Iterator[list[int]]:
    """Yields boundaries of which one, or two side by side, are moved by one."""
    for first in range(1, len(at) - 1):
        for last in range(first, min(first + 2, len(at) - 1)):
            for steps in itertools.product((-1, 0, 1), repeat=last - first + 1):
                moved = list(at)
                for k, step in enumerate(steps, first):
                    moved[k] += step
                if all(a < b for a, b in itertools.pairwise(moved)):
                    yield moved


def _stage_cost_tables(costs: Tables, num_stages: int) -> Sequence[Floats]:
    """Returns for each stage the cost of the calls [s, e), in units of the mean.

    A stage without calls, s >= e, costs infinity: it is not admissible.
    """
    if len(costs) and np.ndim(costs[0]):
        of_stage = costs if np.ndim(costs[0]) == 1 else costs[0]
        num_calls = len(of_stage) - 1
        tables = _check_tables("costs", costs, num_calls, num_stages)
        admissible = np.triu(np.ones_like(tables[0], np.bool_), 1)
        mean = np.mean([table[admissible].mean() for table in tables]) or 1.0
        return _MappedTables(lambda c: np.where(admissible, c / mean, math.inf), tables)
    array = np.asarray(costs, np.float64)
    if array.ndim != 1 or not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError(
            "`costs` holds one finite number of at least 0 for each call. Received "
            f"costs={array.tolist()}. Leave out what was not measured."
        )
    # By the largest first: the sum of large ones may overflow.
    each = array / array.max() if array.any() else np.ones_like(array)
    sums = np.concatenate([[0.0], np.cumsum(each / each.sum() * len(each))])
    stages: Floats = sums[None, :] - sums[:, None]  # [L+1, L+1]
    stages[np.tril_indices_from(stages)] = math.inf
    return [stages] * max(num_stages, 1)


def _start_mask(
    may_start: Sequence[bool] | None, num_calls: int
) -> npt.NDArray[np.bool_]:
    """Returns for each call whether a stage may start with it, the first included."""
    if may_start is None:
        return np.ones(num_calls, np.bool_)
    if len(may_start) != num_calls:
        raise ValueError(
            "`may_start` holds one boolean for each call. Received "
            f"{len(may_start)} for {num_calls} calls. Give one for the first, too."
        )
    starts = np.array(may_start, np.bool_)
    starts[:1] = True
    return starts


def _check_table(name: str, values: npt.ArrayLike, num_calls: int) -> Floats:
    """Checks a user's table over stages, and returns a copy."""
    table = np.array(values, np.float64)
    shape = (num_calls + 1, num_calls + 1)
    if table.shape != shape:
        raise ValueError(
            f"`{name}` holds what a stage of the calls [s, e) has at index [s, e], "
            f"with shape {shape} for {num_calls} calls. Received shape {table.shape}. "
            "Leave zeros where s >= e."
        )
    read = np.triu(table, 1)
    if not (read.min() >= 0 and read.max() < math.inf):
        read = table[np.triu_indices_from(table, 1)]
        raise ValueError(
            f"`{name}` holds finite numbers of at least 0 wherever s < e. Received "
            f"values from {read.min()} to {read.max()}. Correct the table, or use "
            "`may_start` for stages that cannot be."
        )
    return table


def _check_tables(
    name: str, values: Tables, num_calls: int, num_stages: int
) -> Sequence[Floats]:
    """Returns copies of a user's tables, one for each stage."""
    if np.ndim(values[0]) <= 1:
        return [_check_table(name, values, num_calls)] * num_stages
    if len(values) != num_stages:
        raise ValueError(
            f"`{name}` holds one table for all stages, or a list of one for each. "
            f"Received {len(values)} tables for {num_stages} stages. Give as many."
        )
    return _MappedTables(lambda table: _check_table(name, table, num_calls), values)


class _MappedTables(Sequence[Floats]):
    """A function of the tables of each stage, computed when it is read.

    That of the last stage is held, for those after it that have the same tables.
    """

    def __init__(self, make: Callable[..., Floats], *tables: Sequence[Floats]) -> None:
        self._make, self._tables = make, tables
        self._last: tuple[Sequence[Floats], Floats] | None = None

    def __len__(self) -> int:
        return len(self._tables[0])

    def __getitem__(self, k: Any) -> Any:
        given = [tables[k] for tables in self._tables]
        if self._last is None or any(map(operator.is_not, given, self._last[0])):
            self._last = None  # Freed before the next one is made.
            self._last = given, self._make(*given)
        return self._last[1]


def _least_bottleneck(tables: Sequence[Floats]) -> float:
    """Returns the least, over all partitions, of the largest entry of a stage."""
    least = np.full(len(tables[0]), math.inf)
    least[0] = 0.0
    for table in tables:
        least = np.maximum(least[:, None], table).min(axis=0)  # [s, e] -> [e]
    return float(least[-1])


def _fewest_bytes(costs: Sequence[Floats], received: Floats) -> tuple[int, ...]:
    """Returns the partition of finite cost with the fewest bytes, then the evenest."""
    size = len(received)
    ends = np.arange(size)
    counted = CALL_WEIGHT * (ends[None, :] - ends[:, None]) ** 2  # [s, e]
    fewest = np.full(size, math.inf)  # [e], for the calls before e
    fewest[0] = 0.0
    evenest = fewest
    starts_before: list[npt.NDArray[np.intp]] = []  # Of the last stage, per stage, [e].
    for cost in costs:
        bytes_in = np.where(np.isinf(cost), math.inf, received)  # [s, e]
        squares = cost**2 + counted  # [s, e]
        choices = fewest[:, None] + bytes_in
        fewest = choices.min(axis=0)
        choices = np.where(choices == fewest, evenest[:, None] + squares, math.inf)
        starts = choices.argmin(axis=0)
        evenest = choices[starts, ends]
        starts_before.append(starts)
    bounds = [size - 1]
    for starts in reversed(starts_before):
        bounds.append(int(starts[bounds[-1]]))
    return tuple(end - start for start, end in itertools.pairwise(reversed(bounds)))
