"""The IR of a model: calls on values, and segments of consecutive calls.

Whatever Keras calls a model (a stack of layers, a graph with branches, several inputs
and outputs, a layer used twice) is here one list of calls in an order in which each
comes after those whose results it needs. A *segment* is a run of consecutive calls.
Segments are connected by the values that one outputs and another takes as input. Each
goes straight from its segment to those that use it, however far apart they are:

    segment 0     segment 1     segment 2
    a ─▶ b ─┬───▶ c ─▶ d ─────▶ e ─▶ f        1 reads b from 0, 2 reads d from 1
            └─────────────────▶                and the skip b from 0
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tfgpipe._util import unique
from tfgpipe.schedules import DataFlow


@dataclasses.dataclass(frozen=True)
class Value:
    """Stands for a tensor in the arguments of a call."""

    id: int


@dataclasses.dataclass(frozen=True)
class Call:
    """One use of a layer.

    Attributes:
        layer: The Keras layer or operation that is called.
        args: Its positional arguments, nested, with a `Value` for each tensor.
        kwargs: Its keyword arguments, with a `Value` for each tensor.
        input_ids: Ids of the values in the arguments, each once.
        output_ids: Ids of the values that it returns, in flat order.
        read_losses: Function from the losses that the layer has added, and the number
            of examples, to those that remain, and values that the call returns after
            those of the layer. Calls with one function and equal layers return the
            same. None for no such values.
        batch_id: Id of an input that has an example in each row, if there is such a
            function.
    """

    layer: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    read_losses: Callable[[Sequence[Any], Any], tuple[list[Any], list[Any]]] | None = (
        None
    )
    batch_id: int = -1


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive calls of a call graph.

    Attributes:
        calls: The calls, in order.
        input_ids: Ids of the values that come from outside, in order of first use.
        output_ids: Ids of the values computed here and used elsewhere.
    """

    calls: tuple[Call, ...]
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]

    @property
    def layers(self) -> tuple[Any, ...]:
        """The layers that are called, each once."""
        return tuple(unique(call.layer for call in self.calls))


@dataclasses.dataclass(frozen=True)
class CallGraph:
    """The calls of a whole model.

    Attributes:
        calls: All calls, each after those whose results it uses.
        input_ids: Ids of the model's inputs.
        output_ids: Ids of the model's outputs; one may be there twice.
    """

    calls: tuple[Call, ...]
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]

    def segment(self, span: slice) -> Segment:
        """Returns the segment that contains the calls in `span`."""
        calls = self.calls[span]
        inside = dict.fromkeys(i for call in calls for i in call.output_ids)
        inputs = dict.fromkeys(i for call in calls for i in call.input_ids)
        last, stop = self._last_use, span.indices(len(self.calls))[1]
        return Segment(
            calls,
            input_ids=tuple(i for i in inputs if i not in inside),
            output_ids=tuple(i for i in inside if last.get(i, -1) >= stop),
        )

    @functools.cached_property
    def _last_use(self) -> Mapping[int, int]:
        """By value the last call that uses it; the number of calls for outputs."""
        last = {n: i for i, call in enumerate(self.calls) for n in call.input_ids}
        return last | dict.fromkeys(self.output_ids, len(self.calls))

    @functools.cached_property
    def flow(self) -> DataFlow:
        """The data flow between calls; the last one takes the loss of outputs."""
        read = [call.input_ids for call in self.calls]
        read[-1:] = [(*ids, *self.output_ids) for ids in read[-1:]]
        return DataFlow.of_values(read, [call.output_ids for call in self.calls])

    def received_bytes(
        self, sizes: Mapping[int, float], *, with_inputs: bool = False
    ) -> npt.NDArray[np.float64]:
        """Returns for all `s`, `e` the bytes that a segment of calls `[s, e)` receives.

        A value counts once, however many calls of the segment use it; values of the
        segment itself do not count.

        Args:
            sizes: Bytes of each value.
            with_inputs: True to count inputs of the model as well.

        Returns:
            `[L + 1, L + 1]`, zero where `e <= s`.
        """
        num_calls = len(self.calls)
        table = np.zeros((num_calls + 1, num_calls + 1))
        row = self.received_row(sizes, with_inputs=with_inputs)
        for start in range(num_calls):
            table[start, start + 1 :] = row(start, num_calls)
        return table

    def received_row(
        self, sizes: Mapping[int, float], *, with_inputs: bool = False
    ) -> Callable[[int, int], npt.NDArray[np.float64]]:
        """Returns a function from `s` and `e` to one row of `received_bytes`.

        The row is of the segments `[s, s + 1)` to `[s, e)`. It takes time in proportion
        to their number, and is called for `s` in ascending order.

        Args:
            sizes: Bytes of each value.
            with_inputs: True to count inputs of the model as well.
        """
        producer = {n: i for i, call in enumerate(self.calls) for n in call.output_ids}
        if with_inputs:
            producer |= dict.fromkeys(self.input_ids, -1)
        users: dict[int, list[int]] = {}
        for i, call in enumerate(self.calls):
            for n in call.input_ids:
                if n in producer:
                    users.setdefault(n, []).append(i)
        # By call: the first use of a value, among the calls from s on, for segments
        # with `after < s <= first use`.
        added: dict[int, list[tuple[int, float]]] = {}
        for n, calls in users.items():
            for after, use in itertools.pairwise([producer[n], *calls]):
                added.setdefault(after + 1, []).append((use, sizes[n]))
        at_call = np.zeros(len(self.calls))
        num_added = 0

        def row(start: int, end: int) -> npt.NDArray[np.float64]:
            nonlocal num_added
            for s in range(num_added, start + 1):
                for use, size in added.get(s, ()):
                    at_call[use] += size
            num_added = max(num_added, start + 1)
            return np.cumsum(at_call[start:end])

        return row
