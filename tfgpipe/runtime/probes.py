"""Probes: tries of a layer, a loss or a metric on noise, for what nobody declares.

Code that works on data may well fail on noise, so a probe that fails says nothing about
training, and never stops it: what it could not find out is a warning.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

_K = TypeVar("_K")
_T = TypeVar("_T")

# Characters of an error that a warning quotes.
_MOST_TEXT = 300


@dataclasses.dataclass(frozen=True)
class FailedProbe:
    """A probe that failed.

    Attributes:
        name: The name of the layer, loss or metric.
        reason: The error.
    """

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Probe(Generic[_K, _T]):
    """A probe that is to run.

    Attributes:
        key: A key to find its verdict by.
        name: The name of the layer, loss or metric.
        run: A function that tries it, and returns the verdict.
    """

    key: _K
    name: str
    run: Callable[[], _T | FailedProbe]

    def verdict(self) -> _T | FailedProbe:
        """Returns the verdict, `FailedProbe` if any error was raised."""
        try:
            return self.run()
        except Exception as error:
            text = " ".join(str(error).split())
            reason = f"{type(error).__name__}: {text[:_MOST_TEXT]}"
            return FailedProbe(self.name, reason)


def verdicts(
    probes: Iterable[Probe[_K, _T]], question: str, otherwise: str
) -> Iterator[tuple[_K, _T | FailedProbe]]:
    """Runs probes one after the other, and warns of those that failed, at the end.

    Args:
        probes: The probes.
        question: The question that they are to answer: "Whether each ...". If it is
            empty, nobody is warned.
        otherwise: The assumption made instead, and the consequence if it is wrong.
    """
    failures: dict[str, FailedProbe] = {}
    for probe in probes:
        verdict = probe.verdict()
        if isinstance(verdict, FailedProbe):
            failures.setdefault(probe.name, verdict)
        yield probe.key, verdict
    if failures and question:
        first, *others = failures.values()
        more = f" and {len(others)} more" if others else ""
        warnings.warn(
            f"{question} could not be found out by trying it. Received "
            f"'{first.name}'{more} ({first.reason}). {otherwise}",
            stacklevel=3,
        )
