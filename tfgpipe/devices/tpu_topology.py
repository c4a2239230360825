"""Assigns cores of a TPU slice to the stages of each replica.

A slice is a grid of chips, of one core each (v4, v5e) or two (v2, v3). The outputs of a
stage go to the stage after, so the two are best on one chip or on neighbouring ones.
A snake through the grid visits all cores in that way, and each replica takes the next
K of it:

    v4-8, K = 2, D = 2        v5e-16, K = 4, D = 4

    0.0 ─ 0.1                 0.0 ─ 0.1 ─ 0.2 ─ 0.3
           ┆                                     ┆
    1.1 ─ 1.0                 1.3 ─ 1.2 ─ 1.1 ─ 1.0
                               ┆
    replica.stage             2.0 ─ 2.1 ─ 2.2 ─ 2.3
                                                 ┆
                              3.3 ─ 3.2 ─ 3.1 ─ 3.0
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

# Coordinates of a core: x, y and z of its chip, and its index on it.
Core = tuple[int, int, int, int]
Torus = tuple[bool, bool, bool]

_FLAT: Torus = (False, False, False)


def assign_slice_cores(
    slice_topology: Any, *, num_stages: int, num_replicas: int, torus: Torus
) -> tuple[tuple[Core, ...], ...]:
    """Returns the cores of each replica's stages as `assign_cores`, of a slice."""
    return assign_cores(
        tuple(map(int, slice_topology.mesh_shape)),
        num_stages=num_stages,
        num_replicas=num_replicas,
        missing=[tuple(core) for core in slice_topology.missing_devices.tolist()],
        torus=torus,
    )


def assign_cores(
    shape: Sequence[int],
    *,
    num_stages: int,
    num_replicas: int = 1,
    missing: Collection[Core] = (),
    torus: Torus = _FLAT,
) -> tuple[tuple[Core, ...], ...]:
    """Returns the cores of each replica's stages, `[replica][stage]`.

    Neighbouring stages are on one chip or on neighbouring chips, and no core is used
    twice. In a slice without missing cores there is such a choice whenever there are
    enough of them.

    >>> assign_cores((2, 2, 1, 1), num_stages=2, num_replicas=2)
    (((0, 0, 0, 0), (1, 0, 0, 0)), ((1, 1, 0, 0), (0, 1, 0, 0)))

    Args:
        shape: Number of chips along x, y and z, and of cores on each.
        num_stages: K.
        num_replicas: D.
        missing: Cores of the grid that are not there.
        torus: Along which axes the last chip is next to the first.

    Raises:
        ValueError: If K or D is below 1, or no such choice was found.
    """
    K, D = num_stages, num_replicas
    if K < 1 or D < 1:
        raise ValueError(
            "There must be at least one stage and one replica. Received "
            f"num_stages={K}, num_replicas={D}."
        )
    there = math.prod(shape) - len(set(missing))
    most = 0
    if there >= K * D:
        for axes in itertools.permutations(range(3)):
            runs = _contiguous_runs(
                _snake(shape, axes), shape, frozenset(missing), torus
            )
            found = [
                tuple(run[start : start + K])
                for run in runs
                for start in range(0, len(run) - K + 1, K)
            ]
            if len(found) >= D:
                return tuple(found[:D])
            most = max(most, len(found))
    size = " x ".join(map(str, shape))
    raise ValueError(
        f"{K} stages x {D} replicas need {K * D} TPU cores, those of a replica in a "
        f"chain of neighbours. Received a slice of {size} (x, y, z, cores a chip) with "
        f"{there} cores"
        + (f", of which chains of {K} were found for {most} replicas" if most else "")
        + ". Use fewer stages or replicas, or a larger slice."
    )


def adjacent(a: Core, b: Core, shape: Sequence[int], torus: Torus = _FLAT) -> bool:
    """Returns whether two cores are on one chip, or on neighbouring ones.

    >>> adjacent((0, 0, 0, 0), (3, 0, 0, 0), (4, 4, 1, 1))
    False
    >>> adjacent((0, 0, 0, 0), (3, 0, 0, 0), (4, 4, 1, 1), (True, True, False))
    True
    """
    steps = [abs(i - j) for i, j in zip(a[:3], b[:3], strict=True)]
    for axis, around in enumerate(torus):
        if around:
            steps[axis] = min(steps[axis], shape[axis] - steps[axis])
    return sum(steps) <= 1


def _snake(shape: Sequence[int], axes: Sequence[int]) -> list[Core]:
    """Returns all cores, each on the chip of the one before or next to it.

    Args:
        shape: Shape of the slice.
        axes: Axes of the grid, from that which moves first to that which moves last.
    """
    order = [*reversed(axes), 3]
    walk: list[tuple[int, ...]] = [()]
    for axis in order:
        # Back and forth, so that where an outer axis moves no inner one does.
        walk = [
            (*outer, i)
            for n, outer in enumerate(walk)
            for i in range(shape[axis])[:: -1 if n % 2 else 1]
        ]
    x, y, z, core = (order.index(axis) for axis in range(4))
    return [(at[x], at[y], at[z], at[core]) for at in walk]


def _contiguous_runs(
    cores: Sequence[Core], shape: Sequence[int], missing: Collection[Core], torus: Torus
) -> list[list[Core]]:
    """Returns the runs of a walk in which each core is next to the one before."""
    runs: list[list[Core]] = []
    for core in cores:
        if core in missing:
            continue
        if runs and adjacent(runs[-1][-1], core, shape, torus):
            runs[-1].append(core)
        else:
            runs.append([core])
    if len(runs) > 1 and adjacent(runs[-1][-1], runs[0][0], shape, torus):
        runs[0] = runs.pop() + runs[0]
    return runs
