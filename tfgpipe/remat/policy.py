"""Rematerialisation policies: what a forward saves, and what a backward recomputes.

A policy makes two choices, and all else follows from them:

* `keeps`: whether the forward of a microbatch saves what its backward reads, or the
  backward computes it again from the inputs of the stage;
* `segment`: which layers are recomputed together. The backward computes each such
  segment again from the segment's inputs, and holds the activations of one of them.

|                     | no segments     | segments                                 |
|---------------------|-----------------|------------------------------------------|
| forward saves       | all activations | inputs of the segments                   |
| backward recomputes | the whole stage | inputs of the segments, then each segment |

Activation checkpointing by segments is that of Chen et al. 2016 ("Training Deep Nets
with Sublinear Memory Cost", section 4), by stages that of GPipe (Huang et al. 2019,
section 2.3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar

from tfgpipe._util import Choice, argument_checks
from tfgpipe.remat.forward_graph import DeviceStages, ForwardGraph
from tfgpipe.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Remat(Choice):
    """A rematerialisation policy: a backward recomputes the whole stage.

    A policy of one's own is a frozen dataclass, in one file:

    >>> import dataclasses
    >>> from tfgpipe.remat import Remat
    >>> @dataclasses.dataclass(frozen=True)
    ... class KeepEverySecond(Remat):
    ...     keeps_all = True
    ...     def segment(self, num_layers):
    ...         return 2
    >>> KeepEverySecond().recomputed(5)
    [1, 1, 1, 1, 1]

    To be saved with a model, it is registered with
    `keras.saving.register_keras_serializable`.

    Attributes:
        name: Name in tables and saved models. Of the class.
        keeps_all: True if forwards save what backwards read, of all microbatches. Of
            the class.
        reads_names: True if `saved` depends on names of operations, which stages that
            compute the same may differ in. Of the class.
    """

    keeps_all: ClassVar[bool] = False
    reads_names: ClassVar[bool] = False

    @property
    def saves_results(self) -> bool:
        """True if forwards save some results, from which the rest is recomputed."""
        return False

    def saved(self, graph: ForwardGraph) -> Collection[str]:
        """Returns the tensors that forwards save if `saves_results`.

        Of stages without segments.

        Args:
            graph: The operations that a backward would run again without them.
        """
        del graph
        return ()

    @property
    def fills_memory(self) -> bool:
        """True if forwards save as much as the device has memory for."""
        return False

    def within(self, memory_limit: argument_checks.MemoryLimit) -> Remat:
        """Returns the policy for devices of some bytes, or None for any number."""
        del memory_limit
        return self

    def for_stages(
        self, num_stages: int, devices: Callable[[], Sequence[DeviceStages]]
    ) -> tuple[Remat, ...]:
        """Returns the policy of each stage, once the stages are traced.

        Args:
            num_stages: The number of stages.
            devices: Returns what the stages of each device hold.

        Raises:
            ValueError: If a device has too little memory.
        """
        del devices
        return (self,) * num_stages

    def keeps(self, schedule: Schedule, k: int, m: int) -> bool:
        """Returns whether the forward of a microbatch saves what its backward reads.

        One that does though `keeps_all` is false should be a microbatch whose backward
        follows at once: the memory of others is not accounted for.

        Args:
            schedule: The order of actions.
            k: The stage.
            m: The microbatch.
        """
        del schedule, k, m
        return self.keeps_all

    def segment(self, num_layers: int) -> int | None:
        """Returns the length of the first segment of a stage, or of the rest of one.

        Args:
            num_layers: The number of layers from there to the end of the stage.

        Returns:
            The number of layers that are recomputed together, or None for no segments.
        """
        del num_layers
        return None

    def segments(self, num_layers: int) -> tuple[slice, ...]:
        """Returns the segments of a stage of layers; one of all if there are none."""

        def spans() -> Iterator[slice]:
            start = 0
            while start < num_layers:
                left = num_layers - start
                length = min(self.segment(left) or left, left)
                yield slice(start, start + length)
                start += length

        return tuple(spans())

    def has_segments(self, num_layers: int) -> bool:
        """Returns whether layers of a stage are recomputed segment by segment."""
        return self.segment(num_layers) is not None

    def recomputed(self, num_layers: int, *, kept: bool | None = None) -> list[int]:
        """Returns the number of recomputations of each layer in a backward.

        Without segments the stage is computed once, from its inputs. With segments it
        is, too, up to the input of the last one, and each segment once more.

        Args:
            num_layers: The number of layers of the stage.
            kept: True for a microbatch whose forward saves what its backward reads.
                None for `keeps_all`.
        """
        by_segment = int(self.has_segments(num_layers))
        if self.keeps_all if kept is None else kept:
            return [by_segment] * num_layers
        if not by_segment:
            return [1] * num_layers
        *_, last = self.segments(num_layers)
        return [2] * last.start + [1] * (num_layers - last.start)

    def saved_bytes(
        self,
        activations: Sequence[float],
        inputs: Sequence[float],
        kept: Sequence[float] = (),
    ) -> Any:
        """Returns the bytes that a stage holds of each microbatch in flight.

        In addition to the stage's inputs.

        Args:
            activations: Bytes that the backward of each layer reads.
            inputs: Bytes of the inputs of each layer.
            kept: Bytes of results that each saves.
        """
        if not self.keeps_all:
            return sum(kept) if self.saves_results else 0.0
        if not self.has_segments(len(activations)):
            return sum(activations)
        return sum(inputs[span.start] for span in self.segments(len(inputs))[1:])

    def recomputed_bytes(
        self,
        activations: Sequence[float],
        inputs: Sequence[float],
        kept: Sequence[float] = (),
    ) -> Any:
        """Returns the bytes of what is recomputed, during the backward of a microbatch.

        Arguments are those of `saved_bytes`.
        """
        num_layers = len(activations)
        if not self.has_segments(num_layers):
            known = sum(kept) if self.saves_results else 0.0
            return 0.0 if self.keeps_all else sum(activations) - known
        spans = self.segments(num_layers)
        largest = max(sum(activations[span]) for span in spans)
        if self.keeps_all:
            return largest
        return largest + sum(inputs[span.start] for span in spans[1:])
