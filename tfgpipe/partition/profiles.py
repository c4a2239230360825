"""Costs of the calls of a network, alone and combined into stages."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import schedules
from tfgpipe._compat import keras_internals
from tfgpipe._util import counts_text, stage_spans
from tfgpipe.capture import Network, Wire
from tfgpipe.devices import sharding
from tfgpipe.partition import costs
from tfgpipe.partition.costs import Weights, Work
from tfgpipe.runtime import example_tensor
from tfgpipe.schedules import Schedule
from tfgpipe.simulation import recomputed
from tfgpipe.stage import Remat, Transfer, TransferDtype

Quantity = Literal["params", "flops", "time", "memory"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of a plan, beside the model.

    Attributes:
        num_stages: K.
        num_microbatches: M.
        remat: What the backward recomputes.
        memory_limit: Bytes that a device has, or None.
        num_slots: Optimizer slots a trained weight: 2 for Adam, 1 for momentum.
        transfer_dtype: What values are compressed to on their way.
        schedule: The order of actions, and which stages share a device. None for
            GPipe's, a device for each stage.
    """

    num_stages: int
    num_microbatches: int
    remat: Remat
    memory_limit: float | None = None
    num_slots: int = 2
    transfer_dtype: TransferDtype | None = None
    schedule: Schedule | None = None

    @functools.cached_property
    def order(self) -> Schedule:
        """The schedule."""
        return self.schedule or schedules.gpipe(self.num_stages, self.num_microbatches)

    @functools.cached_property
    def recomputed(self) -> tuple[float, ...]:
        """For each stage, of how many of its M microbatches it recomputes the forward.

        Of one that is recomputed `"layer"` may compute layers more than once.
        """
        K, M, order = self.num_stages, self.num_microbatches, self.order
        if self.remat != "except_last":
            return (0.0 if self.remat == "none" else M,) * K
        kept = [sum(order.follows_at_once(k, m) for m in range(M)) for k in range(K)]
        return tuple(float(M - count) for count in kept)


@dataclasses.dataclass(frozen=True)
class StageBytes:
    """Memory of a stage of the calls [s, e), `[T, s, e]` on the device of each shard.

    Attributes:
        held: Weights, and saved tensors of the microbatches in flight.
        working: Workspace, beside that, while it computes.
    """

    held: np.ndarray
    working: np.ndarray


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
        arrived: The bytes of these values after they are decoded.
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
        """Returns the cost of each call, in parameters, FLOPs or seconds.

        Where costs of calls do not add up to those of a stage, see `tables`, it is that
        of a call amid the first stage.
        """
        if quantity == "params":
            return [w.parameters for w in self.weights]
        again = settings.recomputed[0] / settings.num_microbatches
        if settings.remat == "layer":
            again, _ = recomputed("layer", 2)
        works = self.seconds if quantity == "time" else self.flops
        return [(1 + again) * work.forward + work.backward for work in works]

    def tables(self, quantity: Quantity, settings: Settings) -> list[np.ndarray]:
        """Returns for each stage what it costs of the calls [s, e), at index [s, e].

        Stages that cost the same have the same array.
        """
        K, M = settings.num_stages, settings.num_microbatches
        if quantity == "memory":
            return self.memory(settings)
        if quantity == "params":
            return [_sums(self.work(quantity, settings))] * K
        works = self.seconds if quantity == "time" else self.flops
        once = _sums([work.forward + work.backward for work in works])
        forward = _sums([work.forward for work in works])
        if settings.remat == "layer":
            amid, at_end = recomputed("layer", 2)
            last = np.array([0.0, *(work.forward for work in works)])  # [e]
            return [once + amid * forward + np.triu((at_end - amid) * last, 1)] * K
        made = {n: once + n / M * forward for n in settings.recomputed}
        return [made[n] for n in settings.recomputed]

    def memory(self, settings: Settings) -> list[np.ndarray]:
        """Returns for each stage the bytes that it needs of the calls [s, e).

        In shards it is what the device needs that needs most.
        """
        made: dict[int, np.ndarray] = {}
        parts = self.stage_bytes(settings)
        for part in parts:
            if id(part) not in made:
                made[id(part)] = np.max(part.held + part.working, axis=0)
        return [made[id(part)] for part in parts]

    def stage_bytes(self, settings: Settings) -> list[StageBytes]:
        """Returns for each stage what it holds of the calls [s, e).

        Weights, a gradient and the slots of those that are trained, and activations: of
        the microbatches in flight without rematerialisation; with it, what each of
        these received and, while it computes, the activations of one microbatch, of one
        call at a time for `"layer"`. A backward in two halves holds those of as many
        microbatches as have begun one.
        """
        order = settings.order
        made: dict[tuple[int, int], StageBytes] = {}
        counts = list(zip(order.in_flight, order.in_backward, strict=True))
        for each in counts:
            if each not in made:
                parts = [
                    self._bytes(settings, *each, t) for t in range(self.num_shards)
                ]
                held, working = zip(*parts, strict=True)
                made[each] = StageBytes(np.array(held), np.array(working))
        return [made[each] for each in counts]

    def device_bytes(
        self, settings: Settings, counts: Sequence[int]
    ) -> tuple[float, ...]:
        """Returns the bytes that each device needs, of all its stages.

        What each stage holds, and while one computes what that takes.

        Args:
            settings: What for.
            counts: The number of calls in each stage.
        """
        return device_bytes(self.stage_bytes(settings), settings.order, counts)

    def _bytes(
        self, settings: Settings, in_flight: int, in_backward: int, shard: int
    ) -> tuple[np.ndarray, np.ndarray]:
        copies = 1 + settings.num_slots
        held = _sums(
            [w.bytes[shard] + copies * w.trained_bytes[shard] for w in self.weights]
        )
        kept = [sizes[shard] for sizes in self.kept]
        # What goes from stage to stage goes from lead to lead.
        arrived, reads = (self.arrived, _sums(self.reads)) if shard == 0 else (0.0, 0.0)
        if settings.remat == "none":
            held = held + in_flight * (arrived + _sums(kept))
            return held, np.zeros_like(held)
        working = _sums(kept)
        if settings.remat == "layer":
            working = reads + _maxima(kept)
        return held + in_flight * arrived, in_backward * working


def device_bytes(
    stages: Sequence[StageBytes], schedule: Schedule, counts: Sequence[int]
) -> tuple[float, ...]:
    """Returns the bytes that each device of a schedule needs, of all its stages.

    Args:
        stages: What each stage holds.
        schedule: Which stages are on which device.
        counts: The number of calls in each stage.
    """
    held: list[Any] = [0.0] * schedule.num_devices
    working: list[Any] = [0.0] * schedule.num_devices
    spans = stage_spans(counts)
    for p, stage, span in zip(schedule.placement, stages, spans, strict=True):
        held[p] = held[p] + stage.held[:, span.start, span.stop]  # [T]
        mine = stage.working[:, span.start, span.stop]  # [T]
        working[p] = np.maximum(working[p], mine)
    return tuple(float(np.max(a + b)) for a, b in zip(held, working, strict=True))


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
    singles = stage_spans([1] * len(network.calls))
    traced = costs.TracedParts(network, singles, specs)
    sizes = traced.sizes()
    sent = Transfer(transfer_dtype, network.outputs).sizes(traced.values())
    seconds: list[Work] = []
    if device is not None:
        tensors = {
            wire: example_tensor(x, unknown_size=1)
            if isinstance(x, tf.TensorSpec)
            else x
            for wire, x in inputs.items()
        }
        seconds = traced.seconds(tensors, device, progress or (lambda count: None))
    return Profile(
        names=tuple(call.layer.name for call in network.calls),
        weights=tuple(costs.call_weights(network)),
        flops=tuple(traced.flops()),
        kept=tuple(traced.kept_bytes()),
        reads=tuple(sum(sizes[n] for n in call.reads) for call in network.calls),
        received=np.array(network.received(sent)),
        arrived=np.array(network.received(sizes)),
        may_start=tuple(may_start(network)),
        rows=next(iter(specs.values())).shape[0] or 1,
        seconds=tuple(seconds),
        sharding=sharding.table({id(c.layer): c.layer for c in network.calls}.values()),
    )


def may_start(network: Network) -> list[bool]:
    """Returns for each call whether a stage may start with it.

    All calls that use a variable which a step changes belong in one stage.
    """
    return _may_start([call.layer for call in network.calls])


def check_feasible(
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
        f"{num_stages} for a model of {len(called)} calls, {counts_text(names)}, "
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
    inner = keras_internals.inner_layers(layer)
    leaves = [x for x in inner if len(keras_internals.inner_layers(x)) == 1]
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
        for variable in keras_internals.changeable(layer):
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
