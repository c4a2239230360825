"""What policies see that choose results to save: a stage's forward, and a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class ForwardGraph:
    """The operations that the backward of a stage would run again, if none were saved.

    Attributes:
        types: By the name of each operation, its type, as in `tf.Operation.type`; in an
            order in which they can run.
        reads: By operation, the tensors that it reads of others here, such as `"x:0"`.
        results: By operation, the tensors that it makes and that are read.
        wanted: Tensors that the gradient reads.
        sizes: Bytes of each tensor, for one microbatch.
        cost: A function from the name of an operation to the FLOPs that running it
            again takes, those included that its reading and writing is worth.
        peak_bytes: A function from the tensors that are saved to the most bytes of
            recomputed ones that a backward holds at once.
    """

    types: Mapping[str, str]
    reads: Mapping[str, Sequence[str]]
    results: Mapping[str, Sequence[str]]
    wanted: Collection[str]
    sizes: Mapping[str, float]
    cost: Callable[[str], float]
    peak_bytes: Callable[[Collection[str]], float]

    def results_where(self, condition: Callable[[str, str], bool]) -> list[str]:
        """Returns the results of the operations whose name and type hold."""
        return [
            tensor
            for name, kind in self.types.items()
            if condition(name, kind)
            for tensor in self.results[name]
        ]


@dataclasses.dataclass(frozen=True)
class DeviceStages:
    """The stages of a device in a step.

    Attributes:
        graphs: By stage, what its backward would run again.
        in_flight: By stage, its microbatches in flight.
        in_backward: By stage, the most microbatches whose backward is under way.
        splits_backwards: True if some backwards run in two halves. What the second
            half reads of recomputed tensors is then held between them.
        fixed_bytes: Bytes of all else: weights, gradients, slots, inputs in flight.
            None if the number of examples is not known.
    """

    graphs: Mapping[int, ForwardGraph]
    in_flight: Mapping[int, float]
    in_backward: Mapping[int, float]
    splits_backwards: bool
    fixed_bytes: float | None
