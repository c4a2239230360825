"""A given partition: the calls of layers in each stage."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfgpipe.capture import source_model


@dataclasses.dataclass(frozen=True)
class Partition:
    """The calls of layers in each stage, as a user gives them.

    Attributes:
        entries: The number of calls in each stage; or names of the layers that end each
            stage but the last, each after its last call.
    """

    entries: tuple[int | str, ...]

    @classmethod
    def of(cls, partition: Any) -> Partition:
        """Returns the partition of a list.

        Raises:
            ValueError: If it is no list of counts or names.
        """
        if isinstance(partition, cls):
            return partition
        if isinstance(partition, str) or not isinstance(partition, Iterable):
            raise ValueError(
                "`partition` must be a list with each stage's number of layers, or "
                "with the names of the layers that end each stage but the last. "
                f"Received {partition!r}."
            )
        return cls(tuple(partition))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of layers that end stages; none if the calls are counted."""
        return tuple(x for x in self.entries if isinstance(x, str))

    def calls_per_stage(
        self, source: source_model.SourceModel, num_stages: int | None = None
    ) -> tuple[int, ...]:
        """Returns the number of calls in each stage of a model.

        Args:
            source: The model.
            num_stages: K, or None for any.

        Raises:
            ValueError: If there is no such partition, or it has another K.
        """
        calls = [layer.name for layer in source.calls]
        for name in self.names:
            if name not in calls:
                raise ValueError(
                    "A `partition` of names holds the layers that end each stage but "
                    f"the last. Received '{name}', which "
                    f"{source.describe_location(name)}"
                )
        counts = self.counts(calls)
        if num_stages not in (None, len(counts)):
            raise ValueError(
                "A `partition` says how many stages there are. Received num_stages="
                f"{num_stages} and partition={list(self.entries)}, which makes "
                f"{len(counts)}. Leave `num_stages` out."
            )
        return counts

    def counts(self, calls: Sequence[str]) -> tuple[int, ...]:
        """Returns the number of calls in each stage.

        Args:
            calls: The names of the layers called, in order, those given among them.

        Raises:
            ValueError: If there is no such partition.
        """
        if not self.names:
            return _checked_counts(self.entries, calls)
        last = {name: i for i, name in enumerate(calls)}
        ends = [0, *(last[name] + 1 for name in self.names)]
        counts = [b - a for a, b in itertools.pairwise([*ends, len(calls)])]
        if min(counts) < 1:
            raise ValueError(
                "A `partition` of names holds layers in the order they are called, and "
                f"not the last. Received {list(self.entries)}, which end after calls "
                f"{ends[1:]} of {len(calls)}. Put them in order."
            )
        return tuple(counts)


def _checked_counts(counts: Sequence[Any], calls: Sequence[str]) -> tuple[int, ...]:
    wrong = (
        not isinstance(c, Integral) or isinstance(c, bool) or c < 1 for c in counts
    )
    if not counts or any(wrong):
        raise ValueError(
            "A `partition` list holds the number of calls of layers in each stage, "
            f"each at least 1. Received partition={list(counts)}. Drop the empty "
            "stages, or leave it out."
        )
    if sum(counts) != len(calls):
        raise ValueError(
            "A `partition` list adds up to the number of calls of layers and "
            "operations, inputs not counted, those in models inside one by one. "
            f"Received partition={list(counts)}, which adds up to {sum(counts)}, for "
            f"{len(calls)} calls: {_names_text(calls)}. Correct the list, leave it "
            "out, or name the layers that end each stage but the last"
            f"{_example_names(calls, len(counts))}."
        )
    return tuple(map(int, counts))


def _names_text(names: Sequence[str]) -> str:
    """Returns names, the middle of a long list left out."""
    if len(names) <= 12:
        return ", ".join(names)
    return ", ".join([*names[:6], f"... ({len(names) - 11} more)", *names[-5:]])


def _example_names(names: Sequence[str], num_stages: int) -> str:
    """Returns names that would make so many stages, as an argument."""
    if not 1 < num_stages <= len(names):
        return ""
    ends = [k * len(names) // num_stages for k in range(1, num_stages)]
    example = [names[end - 1] for end in ends]
    unique = all(names.count(name) == 1 for name in example)
    return f", as partition={example}" if unique else ""
