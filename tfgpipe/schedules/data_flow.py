"""The data flow between stages: whose outputs each stage reads.

Most models are a line. Two encoders that a head joins are not: neither waits for the
other, forward or backward.

    line              two encoders

    0 ─▶ 1 ─▶ 2       0 ─▶ 1 ─┐
                              ├─▶ 4
                      2 ─▶ 3 ─┘

A value goes straight from the stage that makes it to those that read it, so skips over
stages are edges as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class DataFlow:
    """The stages that each stage reads from.

    Attributes:
        sources: For each stage, the stages whose outputs it reads, in ascending order.
            All come before it.

    Raises:
        ValueError: If a stage reads from itself or from a later one.

    Example, of two encoders of one stage each, and a head:

    >>> flow = tfgpipe.schedules.DataFlow(((), (), (0, 1)))
    >>> print(tfgpipe.schedules.draw(tfgpipe.schedules.one_f_one_b(3, 3, flow=flow)))
    stage 0  F0 F1 .. B0 F2 B1 .. B2
    stage 1  F0 F1 .. B0 F2 B1 .. B2
    stage 2  .. F0 B0 F1 B1 F2 B2 ..
    """

    sources: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        sources = tuple(tuple(sorted(set(some))) for some in self.sources)
        object.__setattr__(self, "sources", sources)
        for k, some in enumerate(sources):
            if some and not 0 <= some[0] <= some[-1] < k:
                raise ValueError(
                    "A stage reads outputs of stages before it. Received stage "
                    f"{k}, which reads those of {', '.join(map(str, some))}."
                )

    @classmethod
    def line(cls, num_stages: int) -> DataFlow:
        """Returns the data flow in which each stage reads from the one before."""
        return cls(tuple((k - 1,) if k else () for k in range(num_stages)))

    @classmethod
    def of_values(
        cls, read: Sequence[Iterable[Hashable]], made: Sequence[Iterable[Hashable]]
    ) -> DataFlow:
        """Returns the data flow between stages that read and make these values.

        >>> tfgpipe.schedules.DataFlow.of_values([["x"], ["y"]], [["y"], []]).sources
        ((), (0,))

        Args:
            read: For each stage the values that it reads, also those of no stage.
            made: For each stage the values that it makes.
        """
        producers = {value: k for k, values in enumerate(made) for value in values}
        return cls(
            tuple(
                tuple(producers[x] for x in values if producers.get(x, k) != k)
                for k, values in enumerate(read)
            )
        )

    def grouped(self, counts: Sequence[int]) -> DataFlow:
        """Returns the data flow between groups of stages that follow one another.

        >>> tfgpipe.schedules.DataFlow(((), (0,), (0, 1))).grouped([2, 1]).sources
        ((), (0,))

        Args:
            counts: The number of stages in each group.
        """
        group = [g for g, n in enumerate(counts) for _ in range(n)]
        sources: list[set[int]] = [set() for _ in counts]
        for k, some in enumerate(self.sources):
            sources[group[k]] |= {group[j] for j in some} - {group[k]}
        return DataFlow(tuple(map(tuple, sources)))

    @property
    def num_stages(self) -> int:
        """K, the number of stages."""
        return len(self.sources)

    @functools.cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages that read its outputs."""
        targets: list[list[int]] = [[] for _ in self.sources]
        for k, some in enumerate(self.sources):
            for source in some:
                targets[source].append(k)
        return tuple(map(tuple, targets))

    @functools.cached_property
    def heights(self) -> tuple[int, ...]:
        """For each stage, the number of stages on the longest way to the end.

        The stage itself is counted: on a line that is K - k.
        """
        heights = [1] * self.num_stages
        for k in reversed(range(self.num_stages)):
            for source in self.sources[k]:
                heights[source] = max(heights[source], heights[k] + 1)
        return tuple(heights)

    @property
    def depth(self) -> int:
        """The number of stages on the longest way through: K on a line."""
        return max(self.heights, default=0)
