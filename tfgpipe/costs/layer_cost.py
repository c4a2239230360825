"""Costs of a layer: of its weights, and of each example that passes it.

Counted in a trace or by a formula, a cost is of one example, and a microbatch of n
takes n times as much; weights are there once. Profiles of a plan are of a whole
microbatch, which is then their example.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tfgpipe.schedules import ActionKind


def dtype_bytes(dtype: str) -> int:
    """Returns the bytes of a number of a floating-point dtype.

    >>> dtype_bytes("bfloat16")
    2
    """
    return {"float64": 8, "float32": 4}.get(dtype, 2)


@dataclasses.dataclass(frozen=True)
class PassCost:
    """Cost of a layer's passes: FLOPs, bytes or seconds.

    Attributes:
        forward: Cost of the forward.
        backward: Cost of the backward, recomputation aside.
        recompute: Cost of a recomputation. None for that of the forward.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float | None = None

    @property
    def again(self) -> float:
        """Cost of a recomputation."""
        return self.forward if self.recompute is None else self.recompute

    def of(self, kind: ActionKind) -> float:
        """Returns the cost of the pass that a kind of action runs."""
        return self.backward if kind.is_backward else self.forward

    def __truediv__(self, number: float) -> PassCost:
        again = None if self.recompute is None else self.recompute / number
        return PassCost(self.forward / number, self.backward / number, again)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of a layer.

    Attributes:
        count: Number of weights, trained or not.
        trained: Number of trained weights. None for all.
        size: Bytes of one weight, as it is stored.
    """

    count: float = 0
    trained: float | None = None
    size: float = 4

    @property
    def bytes(self) -> float:
        """Bytes of all of them."""
        return self.size * self.count

    @property
    def trained_bytes(self) -> float:
        """Bytes of the trained ones."""
        return self.size * (self.count if self.trained is None else self.trained)

    def copy_bytes(self, dtype: str) -> float:
        """Returns the bytes of their copies for products in another dtype.

        Weights that are stored in more bytes than products take are cast once a step.
        """
        size = dtype_bytes(dtype)
        return size * self.count if size < self.size else 0.0


@dataclasses.dataclass(frozen=True)
class TensorBytes:
    """Bytes of a layer's tensors, for each example.

    Attributes:
        saved: Bytes that the forward saves for the backward.
        workspace: Peak bytes of the backward's own tensors.
        inputs: Bytes of the layer's inputs.
        outputs: Bytes of the layer's outputs.
        received: Bytes that a stage receives which begins with the layer: its inputs,
            and what later layers read. None for the inputs alone.
        replicated: Part of `saved` that every shard of a sharded layer holds.
        saves_inputs: True if `saved` includes the inputs, in place of the outputs.
        kept: Part of `saved` that a forward saves though backwards recompute: results
            of products, or those that another policy names.
    """

    saved: float = 0
    workspace: float = 0
    inputs: float = 0
    outputs: float = 0
    received: float | None = None
    replicated: float = 0
    saves_inputs: bool = False
    kept: float = 0

    @property
    def boundary(self) -> float:
        """Bytes that a stage receives which begins with the layer."""
        return self.inputs if self.received is None else self.received

    def __truediv__(self, number: float) -> TensorBytes:
        return dataclasses.replace(
            self,
            saved=self.saved / number,
            workspace=self.workspace / number,
            inputs=self.inputs / number,
            outputs=self.outputs / number,
            received=None if self.received is None else self.received / number,
            replicated=self.replicated / number,
            kept=self.kept / number,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Cost of one layer, or of several that are always in one stage.

    Attributes:
        name: Name of the layer.
        weights: Number and bytes of the weights.
        flops: FLOPs, per example.
        traffic: Bytes that operations other than matrix products read and write, per
            example, without fusion.
        seconds: Measured seconds, per example; zero where nothing was measured.
        tensors: Bytes of activations, per example.
        positions: Rows of its matrix products, per example: the length of a sequence.
        max_shards: A multiple of the numbers of shards that the layer can be in; 1 for
            a layer that cannot be sharded.
        max_parts: The same of parts of a sequence.
        num_reductions: All-reduces of the output, in each pass, when sharded: 2 for
            an attention followed by a perceptron (Shoeybi et al. 2019).
        keys_values: Bytes of the keys and values of an attention, per example.
        routing: E and k of a mixture of E experts, of which a token takes k; or None.
        num_tokens: Size of the vocabulary, if the layer is the head of a language
            model, with its loss.
        may_start: True if a stage may begin with the layer.
    """

    name: str
    weights: Weights = Weights()
    flops: PassCost = PassCost()
    traffic: PassCost = PassCost()
    seconds: PassCost = PassCost()
    tensors: TensorBytes = TensorBytes()
    positions: float = 1
    max_shards: int = 1
    max_parts: int = 1
    num_reductions: int = 2
    keys_values: float = 0
    routing: tuple[int, int] | None = None
    num_tokens: int = 0
    may_start: bool = True

    def __post_init__(self) -> None:
        for field, value in _numbers(dataclasses.asdict(self)):
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"`{field}` of layer '{self.name}' is a finite number of at "
                    f"least 0. Received {value}."
                )

    def per_example(self, num_examples: int) -> LayerCost:
        """Returns the cost for one of the examples that this one is for."""
        return dataclasses.replace(
            self,
            flops=self.flops / num_examples,
            traffic=self.traffic / num_examples,
            seconds=self.seconds / num_examples,
            tensors=self.tensors / num_examples,
            keys_values=self.keys_values / num_examples,
        )


def _numbers(fields: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Returns the numbers of a nested dictionary, with dotted names."""
    found: list[tuple[str, float]] = []
    for name, value in fields.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            found.append((f"{prefix}{name}", value))
    return found
