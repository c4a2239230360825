"""What the calls of a network cost, alone and together in a stage."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import costs, examples, partition, seams, shards
from tfgpipe.costs import Weights, Work
from tfgpipe.network import Network
from tfgpipe.replay import Wire
from tfgpipe.stage import Remat
from tfgpipe.transfer import Transfer, TransferDtype

Quantity = Literal["params", "flops", "time", "memory"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a plan depends on beside the model.

    Attributes:
        num_stages: K.
        num_microbatches: M.
        remat: What the backward recomputes.
        memory_limit: Bytes that a device has, or None.
        num_slots: Optimizer slots a trained weight: 2 for Adam, 1 for momentum.
        transfer_dtype: What values are compressed to on their way.
    """

    num_stages: int
    num_microbatches: int
    remat: Remat
    memory_limit: float | None = None
    num_slots: int = 2
    transfer_dtype: TransferDtype | None = None


@dataclasses.dataclass(frozen=True)
class Profile:
    """What the calls of a network cost.

    Attributes:
        names: Names of the layers called.
        weights: What each call brings.
        flops: What each call does for a microbatch.
        kept: Bytes each adds to what a backward needs, on each shard's device.
        reads: Bytes that each reads.
        received: For all [s, e) the bytes that a stage of those calls receives.
        arrived: The bytes that these take once they are there, no longer compressed.
        may_start: For each call whether a stage may start with it.
        rows: Rows of a microbatch.
        seconds: What each call takes, where it was measured.
        sharding: A table of the weights that are in parts; empty if there is none.
    """

    names: tuple[str, ...]
    weights: tuple[Weights, ...]
    flops: tuple[Work, ...]
    kept: tuple[tuple[int, ...], ...]
    reads: tuple[int, ...]
    received: np.ndarray
    arrived: np.ndarray
    may_start: tuple[bool, ...]
    rows: int
    seconds: tuple[Work, ...] = ()
    sharding: str = ""

    @property
    def num_shards(self) -> int:
        """T, the number of devices of a stage."""
        return len(self.kept[0])

    def work(self, quantity: Quantity, settings: Settings) -> list[float]:
        """Returns the cost of each call, in parameters, FLOPs or seconds."""
        if quantity == "params":
            return [w.parameters for w in self.weights]
        M = settings.num_microbatches
        forwards = 1 + {"none": 0.0, "except_last": (M - 1) / M}.get(
            settings.remat, 1.0
        )
        works = self.seconds if quantity == "time" else self.flops
        return [forwards * work.forward + work.backward for work in works]

    def table(self, quantity: Quantity, settings: Settings) -> np.ndarray:
        """Returns the cost of a stage of the calls [s, e) at index [s, e]."""
        if quantity == "memory":
            return self.memory(settings)
        return _sums(self.work(quantity, settings))

    def memory(self, settings: Settings) -> np.ndarray:
        """Returns the bytes that a stage of the calls [s, e) needs, at index [s, e].

        Weights, a gradient and the slots of those that are trained, and activations:
        of all microbatches without rematerialisation; with it, what each microbatch
        received and the activations of the one under way, of one call at a time for
        `"layer"`. In shards it is what the device needs that needs most.
        """
        each = [self._memory(settings, t) for t in range(self.num_shards)]
        return np.max(each, axis=0)

    def _memory(self, settings: Settings, shard: int) -> np.ndarray:
        copies = 1 + settings.num_slots
        held = _sums(
            [w.bytes[shard] + copies * w.trained_bytes[shard] for w in self.weights]
        )
        M, remat = settings.num_microbatches, settings.remat
        kept = [sizes[shard] for sizes in self.kept]
        # What goes from stage to stage goes from lead to lead.
        arrived, reads = (self.arrived, _sums(self.reads)) if shard == 0 else (0.0, 0.0)
        if remat == "none":
            return held + M * (arrived + _sums(kept))
        if remat == "layer":
            return held + M * arrived + (reads + _maxima(kept))
        return held + M * arrived + _sums(kept)


def profile(
    network: Network,
    inputs: Mapping[Wire, tf.Tensor | tf.TensorSpec],
    *,
    transfer_dtype: TransferDtype | None = None,
    device: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Profile:
    """Returns what the calls of a network cost.

    Args:
        network: The calls.
        inputs: A microbatch, or its shapes and types alone.
        transfer_dtype: What values are compressed to on their way.
        device: Where to measure time, or None not to. Noise stands in for tensors that
            are not given.
        progress: Called with the number of calls measured so far.
    """
    specs = {wire: tf.TensorSpec(x.shape, x.dtype) for wire, x in inputs.items()}
    singles = partition.spans([1] * len(network.calls))
    traced = costs.TracedParts(network, singles, specs)
    sizes = traced.sizes()
    sent = Transfer(transfer_dtype, network.outputs).sizes(traced.values())
    seconds: list[Work] = []
    if device is not None:
        tensors = {
            wire: examples.tensor(x, unknown_size=1)
            if isinstance(x, tf.TensorSpec)
            else x
            for wire, x in inputs.items()
        }
        seconds = traced.seconds(tensors, device, progress or (lambda count: None))
    return Profile(
        names=tuple(call.layer.name for call in network.calls),
        weights=tuple(costs.weights(network)),
        flops=tuple(traced.flops()),
        kept=tuple(traced.kept_bytes()),
        reads=tuple(sum(sizes[n] for n in call.reads) for call in network.calls),
        received=np.array(network.received(sent)),
        arrived=np.array(network.received(sizes)),
        may_start=tuple(may_start(network)),
        rows=next(iter(specs.values())).shape[0] or 1,
        seconds=tuple(seconds),
        sharding=shards.table({id(c.layer): c.layer for c in network.calls}.values()),
    )


def may_start(network: Network) -> list[bool]:
    """Returns for each call whether a stage may start with it.

    All calls that use a variable which a step changes belong in one stage.
    """
    return _may_start([call.layer for call in network.calls])


def check_possible(
    called: Sequence[Any], num_stages: int | None, closed: Mapping[int, str]
) -> None:
    """Raises ValueError if so many stages cannot be made of these calls.

    Args:
        called: The layers and operations called, in order.
        num_stages: K, or None for a number that is not known yet.
        closed: As `Recording.closed`.
    """
    possible = sum(_may_start(called))
    if num_stages is None or 1 <= num_stages <= possible:
        return
    names = [layer.name for layer in called]
    held = sorted(_held_together(called), key=lambda span: span[1] - span[2])
    together = "".join(
        f" All calls that use '{variable.path}', which a step changes, are in one "
        f"stage: '{names[first]}' to '{names[last]}'. A layer of its own in each place "
        "would let them be apart."
        for variable, first, last in held[:1]
    )
    raise ValueError(
        "Every stage holds at least one call of a layer. Received num_stages="
        f"{num_stages} for a model of {len(called)} calls, {partition.listed(names)}, "
        f"of which at most {possible} stages can be made.{together}"
        f"{_largest_closed(called, closed)} Use num_stages={possible} or fewer."
    )


def _largest_closed(called: Sequence[Any], closed: Mapping[int, str]) -> str:
    """Says which call hides most layers, and why it does."""
    if not closed:
        return ""
    sizes = {i: _num_parameters(called[i]) for i in closed}
    inside = {i: _num_leaves(called[i]) for i in closed}
    largest = max(closed, key=lambda i: (sizes[i], inside[i]))
    layer = called[largest]
    whole = sum(_num_parameters(x) for x in {id(x): x for x in called}.values())
    share = f" and {sizes[largest] / whole:.0%} of the parameters" if whole else ""
    return (
        f" '{layer.name}' ({type(layer).__name__}) holds {inside[largest]} layers"
        f"{share} and is one call, since it is {closed[largest]}: only models are "
        "opened that do nothing but run the calls that Keras knows. To cut inside, "
        "give its layers as a list, or write it as a Functional model."
    )


def _num_leaves(layer: Any) -> int:
    """Returns the number of layers inside that have none inside, inputs not counted."""
    inner = seams.inner_layers(layer)
    leaves = [x for x in inner if len(seams.inner_layers(x)) == 1]
    return sum(not isinstance(x, keras.layers.InputLayer) for x in leaves)


def _num_parameters(layer: Any) -> int:
    return sum(math.prod(v.shape) for v in getattr(layer, "weights", ()))


def _may_start(called: Sequence[Any]) -> list[bool]:
    allowed = [True] * len(called)
    for _, first, last in _held_together(called):
        allowed[first + 1 : last + 1] = [False] * (last - first)
    return allowed


def _held_together(called: Sequence[Any]) -> list[tuple[keras.Variable, int, int]]:
    """Returns variables that steps change, with the first and last of several calls."""
    uses: dict[int, list[int]] = {}
    variables: dict[int, keras.Variable] = {}
    for position, layer in enumerate(called):
        for variable in seams.changeable(layer):
            variables[id(variable)] = variable
            uses.setdefault(id(variable), []).append(position)
    return [
        (variables[key], min(places), max(places))
        for key, places in uses.items()
        if min(places) < max(places)
    ]


def _sums(each: Sequence[float]) -> np.ndarray:
    """Returns the sum over [s, e) at index [s, e]."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(each, np.float64))])
    return np.triu(sums[None, :] - sums[:, None])


def _maxima(each: Sequence[float]) -> np.ndarray:
    """Returns the maximum over [s, e) at index [s, e]."""
    table = np.zeros((len(each) + 1, len(each) + 1))
    for start in range(len(each)):
        table[start, start + 1 :] = list(itertools.accumulate(each[start:], max))
    return table
