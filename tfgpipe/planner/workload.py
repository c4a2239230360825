"""Workloads: layers in a row, with the FLOPs and bytes of each.

A *row* is one example of a mini-batch. All that grows with a microbatch is per row, so
a layer of r rows does r times as much; weights are there once.
"""

from __future__ import annotations

import dataclasses
import math


def dtype_bytes(dtype: str) -> int:
    """Returns the bytes of a number of a type of floats.

    >>> dtype_bytes("bfloat16")
    2
    """
    return {"float64": 8, "float32": 4}.get(dtype, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, or several that are always in one stage.

    Attributes:
        name: Its name.
        parameters: The size of its weights.
        trained: The size of its trained weights. None for all.
        weight_bytes: Bytes of one weight, as it is stored.
        forward_flops: FLOPs of its forward, per row.
        backward_flops: FLOPs of its backward, per row, recomputation aside.
        forward_traffic: Bytes that element-wise operations of the forward read and
            write, per row, without fusion.
        backward_traffic: Likewise in the backward.
        kept_bytes: Bytes that its forward saves for its backward, per row.
        work_bytes: The workspace of its backward, per row.
        input_bytes: Bytes that a stage that begins with it receives, per row.
        output_bytes: Bytes that it returns, per row.
        positions: Rows of its products, per row: the length of a sequence.
        max_shards: T must divide it; 1 for a layer that cannot be sharded.
        num_reductions: All-reduces of its output, in each pass, when sharded: 2 for
            an attention followed by a perceptron (Shoeybi et al. 2019).
        whole_bytes: Of `kept_bytes`, those that every shard has, per row.
        may_start: Whether a stage may begin with it.
    """

    name: str
    parameters: float = 0
    trained: float | None = None
    weight_bytes: float = 4
    forward_flops: float = 0
    backward_flops: float = 0
    forward_traffic: float = 0
    backward_traffic: float = 0
    kept_bytes: float = 0
    work_bytes: float = 0
    input_bytes: float = 0
    output_bytes: float = 0
    positions: float = 1
    max_shards: int = 1
    num_reductions: int = 2
    whole_bytes: float = 0
    may_start: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(
                    f"`{field.name}` of layer '{self.name}' is a finite number of at "
                    f"least 0. Received {value}."
                )

    @property
    def num_trained(self) -> float:
        """The trained ones of its parameters."""
        return self.parameters if self.trained is None else self.trained

    def shards(self, num_shards: int) -> int:
        """Returns in how many parts it is, of T shards: T or 1."""
        return 1 if self.max_shards % num_shards else num_shards

    def share(self, num_shards: int) -> float:
        """Returns the share of its activations that one of T shards holds."""
        T = self.shards(num_shards)
        whole = self.whole_bytes / self.kept_bytes if self.kept_bytes else 0.0
        return whole + (1 - whole) / T


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model as layers in a row.

    Attributes:
        name: Its name.
        layers: From input to loss.
        dtype: What products are computed in: `"float32"`, `"bfloat16"` or `"float16"`.
            Weights that are stored in more bytes are copied.
        traced: Whether bytes were counted operation by operation, without the fusion
            that formulas take for granted.
    """

    name: str
    layers: tuple[Layer, ...]
    dtype: str = "float32"
    traced: bool = False

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(
                f"A workload has at least one layer. Received none for '{self.name}'."
            )

    @property
    def parameters(self) -> float:
        """The size of all weights."""
        return math.fsum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """FLOPs of a step, per row: forward and backward, without recomputation."""
        return math.fsum(
            layer.forward_flops + layer.backward_flops for layer in self.layers
        )

    @property
    def max_stages(self) -> int:
        """The most stages that there can be."""
        return 1 + sum(layer.may_start for layer in self.layers[1:])

    @property
    def max_shards(self) -> int:
        """The number that T divides for any layer to be sharded."""
        return math.lcm(*(layer.max_shards for layer in self.layers))
