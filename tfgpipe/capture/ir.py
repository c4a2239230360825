"""The IR of a model: calls on values, and segments of consecutive calls.

Whatever Keras calls a model (a stack of layers, a graph with branches, several inputs
and outputs, a layer used twice) is here one list of calls in an order in which each
comes after those whose results it needs. A *part* is a run of consecutive calls. What
connects parts are the values made in one and read in another, and each goes straight
from the part that makes it to those that read it, however far apart they are:

    part 0        part 1        part 2
    a ─▶ b ─┬───▶ c ─▶ d ─────▶ e ─▶ f        1 reads b from 0, 2 reads d from 1
            └─────────────────▶                and the skip b from 0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Value:
    """Stands for a tensor in the arguments of a call."""

    number: int


@dataclasses.dataclass(frozen=True)
class Call:
    """One use of a layer.

    Attributes:
        layer: What is called: a Keras layer or operation.
        args: Its positional arguments, nested, with a `Value` for each tensor.
        kwargs: Its keyword arguments, likewise.
        reads: Numbers of the values in the arguments, each once.
        makes: Numbers of the values that it returns, in flat order.
    """

    layer: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive calls of a network.

    Attributes:
        calls: The calls, in order.
        reads: Numbers of the values that come from outside, in order of first use.
        makes: Numbers of the values made here and needed elsewhere.
    """

    calls: tuple[Call, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]

    @property
    def layers(self) -> tuple[Any, ...]:
        """The layers that are called, each once."""
        return tuple({id(call.layer): call.layer for call in self.calls}.values())


@dataclasses.dataclass(frozen=True)
class Network:
    """A whole model.

    Attributes:
        calls: All calls, each after those whose results it reads.
        inputs: Numbers of the values that are given.
        outputs: Numbers of the values that are wanted; one may be wanted twice.
    """

    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def part(self, span: slice) -> Part:
        """Returns the part that contains the calls in `span`."""
        calls = self.calls[span]
        made = dict.fromkeys(number for call in calls for number in call.makes)
        reads = dict.fromkeys(
            number for call in calls for number in call.reads if number not in made
        )
        later = self.calls[span.stop :]
        wanted = {number for call in later for number in call.reads}
        wanted.update(self.outputs)
        return Part(calls, tuple(reads), tuple(n for n in made if n in wanted))

    def received(self, sizes: Mapping[int, float]) -> list[list[float]]:
        """Returns for all `s`, `e` the bytes that a part of calls `[s, e)` receives.

        A value counts once, however many calls of the part read it; inputs of the
        network count as little as values made in the part itself.

        Args:
            sizes: Bytes of each value.

        Returns:
            A table of L + 1 rows and columns, zero where `e <= s`.
        """
        num_calls = len(self.calls)
        maker = {n: i for i, call in enumerate(self.calls) for n in call.makes}
        table = [[0.0] * (num_calls + 1) for _ in range(num_calls + 1)]
        for start in range(num_calls):
            total, seen = 0.0, set[int]()
            for end in range(start, num_calls):
                for number in self.calls[end].reads:
                    if number not in seen and maker.get(number, start) < start:
                        seen.add(number)
                        total += sizes[number]
                table[start][end + 1] = total
        return table
