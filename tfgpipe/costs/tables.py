"""Costs of all stages [s, e) of a model at once, as tables for the solver."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from tfgpipe.costs.memory import LayerBytes, StageBytes
from tfgpipe.remat import Remat

Floats = npt.NDArray[np.float64]


class StageTables(Sequence[Floats]):
    """A table for each stage, made when it is read; the last one alone is held.

    K tables of L layers would take K L^2 numbers.

    Args:
        keys: A key for each stage; equal ones have the same table.
        make: A function from a key to a table.
    """

    def __init__(
        self, keys: Sequence[Hashable], make: Callable[[Hashable], Floats]
    ) -> None:
        self._keys, self._make = keys, make
        self._last: tuple[Hashable, Floats] | None = None

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, k: int) -> Floats: ...
    @overload
    def __getitem__(self, k: slice) -> StageTables: ...
    def __getitem__(self, k: int | slice) -> Floats | StageTables:
        if isinstance(k, slice):
            return StageTables(self._keys[k], self._make)
        key = self._keys[k]
        if self._last is None or self._last[0] != key:
            self._last = None  # Freed before the next one is made.
            self._last = key, self._make(key)
        return self._last[1]


def range_sums(each: Sequence[float]) -> Floats:
    """Returns the sum over [s, e) at index [s, e]."""
    sums = _prefix_sums(each)
    return np.triu(sums[None, :] - sums[:, None])


def weighted_range_sums(
    each: Sequence[float], weights: Callable[[int], Sequence[float]]
) -> Floats:
    """Returns the weighted sum over [s, e) at index [s, e]."""
    sums = _prefix_sums(each)
    table = np.zeros((len(sums), len(sums)))
    for n in range(1, len(sums)):
        starts = np.arange(len(sums) - n)
        first = 0
        for weight, run in itertools.groupby(weights(n)):
            last = first + len(list(run))
            table[starts, starts + n] += weight * (
                sums[starts + last] - sums[starts + first]
            )
            first = last
    return table


def stage_byte_tables(
    shards: Sequence[Sequence[LayerBytes]], remat: Remat, received: Floats
) -> StageBytes:
    """Returns the bytes of all stages, as tables `[T, s, e]`.

    They are those of `stage_bytes`, but that the bytes which a stage receives are given
    for each [s, e).

    Args:
        shards: The bytes of each layer on the device of each shard.
        remat: The rematerialisation policy.
        received: Bytes that a stage receives, on the device of its first shard.
    """

    def sums(name: str) -> Floats:
        each = ([getattr(x, name) for x in layers] for layers in shards)
        return np.stack([range_sums(some) for some in each])

    activations = [
        activation_tables(
            remat,
            [x.saved for x in some],
            [x.inputs for x in some],
            [x.kept for x in some],
        )
        for some in shards
    ]
    saved, recomputed = (np.stack(x) for x in zip(*activations, strict=True))
    inputs = np.zeros_like(saved)
    inputs[0] = received
    return StageBytes(
        weights=sums("weights"),
        trained=sums("trained"),
        inputs=inputs,
        saved=saved,
        recomputed=recomputed,
    )


def activation_tables(
    remat: Remat,
    activations: Sequence[float],
    inputs: Sequence[float],
    kept: Sequence[float] = (),
) -> tuple[Floats, Floats]:
    """Returns the bytes that forwards save and backwards recompute, at index [s, e].

    It is `Remat.saved_bytes` and `Remat.recomputed_bytes` for all stages at once.
    """
    sums, heads_bytes = _prefix_sums(activations), np.asarray(inputs, np.float64)
    size = len(sums)
    # Of the segments of [s, e): the largest, and the inputs of all but the first.
    largest, heads = np.zeros((2, size, size))
    saved, again = np.zeros((2, size, size))
    for n in range(1, size):
        s = np.arange(size - n)
        length = min(remat.segment(n) or n, n)
        largest[s, s + n] = sums[s + length] - sums[s]
        if length < n:
            rest = s + length
            largest[s, s + n] = np.maximum(largest[s, s + n], largest[rest, s + n])
            heads[s, s + n] = heads[rest, s + n] + heads_bytes[rest]
        if not remat.has_segments(n):
            (saved if remat.keeps_all else again)[s, s + n] = largest[s, s + n]
        elif remat.keeps_all:
            saved[s, s + n], again[s, s + n] = heads[s, s + n], largest[s, s + n]
        else:
            again[s, s + n] = largest[s, s + n] + heads[s, s + n]
    if remat.saves_results:
        saved += range_sums(kept)
        again -= range_sums(kept)
    return saved, again


def _prefix_sums(each: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(each, np.float64))])
