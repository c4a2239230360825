"""The axes along which the T devices of a stage share a layer.

    units        heads, hidden units and experts: 1 / T of weights and products each,
                 and whole outputs on all, by an all-reduce (Shoeybi et al. 2019)
    positions    parts of the sequence: 1 / T of activations and products each, with
                 whole weights; keys and values go round a ring (Liu et al. 2023)

As in this library's layers the first device has whole inputs and outputs, and of
positions the weights, which it sends to the others for each pass, and whose gradients
it sums.
"""

from __future__ import annotations

import abc
import math
from typing import ClassVar

from tfgpipe._util import argument_checks
from tfgpipe.costs import LayerCost, PassCost, dtype_bytes
from tfgpipe.planner.devices import Device, Link


def ring_seconds(size: float, num: int, link: Link) -> float:
    """Returns the seconds of an all-reduce on a ring.

    >>> ring_seconds(8e9, 4, Link(bandwidth=12e9, latency=0.5))
    4.0
    """
    if num == 1:
        return 0.0
    hops = 2 * (num - 1)
    return hops * (size / num / link.bandwidth + link.latency)


class ShardAxis(abc.ABC):
    """An axis along which a layer is shared.

    Attributes:
        name: Its name in tables.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def parts(self, layer: LayerCost, num_shards: int) -> int:
        """Returns the number of parts of the layer among T devices: T or 1."""

    @abc.abstractmethod
    def weight_parts(self, layer: LayerCost, num_shards: int) -> int:
        """Returns the number of parts of the weights."""

    @abc.abstractmethod
    def saved_fraction(self, layer: LayerCost, num_shards: int) -> float:
        """Returns the part of the activations that a device holds."""

    @abc.abstractmethod
    def _exchange(
        self, layer: LayerCost, examples: float, num_shards: int, link: Link, dtype: str
    ) -> PassCost:
        """Returns the seconds in which the parts of a layer exchange tensors."""

    def exchange_seconds(
        self,
        layer: LayerCost,
        *,
        examples: float,
        num_shards: int,
        device: Device,
        dtype: str,
    ) -> PassCost:
        """Returns the seconds in which T devices exchange tensors.

        Args:
            layer: The layer, which may not be in T parts.
            examples: Examples of a microbatch.
            num_shards: T.
            device: The kind of each.
            dtype: Dtype of products.
        """
        if self.parts(layer, num_shards) == 1:
            return PassCost()
        link = device.ring_link(num_shards)
        return self._exchange(layer, examples, num_shards, link, dtype)


class _Units(ShardAxis):
    name = "units"

    def parts(self, layer: LayerCost, num_shards: int) -> int:
        return 1 if layer.max_shards % num_shards else num_shards

    def weight_parts(self, layer: LayerCost, num_shards: int) -> int:
        return self.parts(layer, num_shards)

    def saved_fraction(self, layer: LayerCost, num_shards: int) -> float:
        T, tensors = self.parts(layer, num_shards), layer.tensors
        whole = tensors.replicated / tensors.saved if tensors.saved else 0.0
        return whole + (1 - whole) / T

    def _exchange(
        self, layer: LayerCost, examples: float, num_shards: int, link: Link, dtype: str
    ) -> PassCost:
        T, size = num_shards, examples * layer.tensors.outputs
        seconds = layer.num_reductions * ring_seconds(size, T, link)
        if layer.routing is not None:
            E, k = layer.routing
            # A token goes to a device that has any of its experts, once, and back.
            there = 1 - math.comb(E - E // T, k) / math.comb(E, k)
            once = there * size / link.bandwidth + link.latency
            seconds += 2 * (T - 1) * once
        return PassCost(seconds, seconds)


class _Positions(ShardAxis):
    name = "positions"

    def parts(self, layer: LayerCost, num_shards: int) -> int:
        return 1 if layer.max_parts % num_shards else num_shards

    def weight_parts(self, layer: LayerCost, num_shards: int) -> int:
        return 1

    def saved_fraction(self, layer: LayerCost, num_shards: int) -> float:
        return 1 / self.parts(layer, num_shards)

    def _exchange(
        self, layer: LayerCost, examples: float, num_shards: int, link: Link, dtype: str
    ) -> PassCost:
        T, tensors = num_shards, layer.tensors
        # To the others and back: as much as an all-reduce.
        outputs = ring_seconds(examples * tensors.outputs, T, link)
        hops = layer.num_reductions * outputs
        ring = ring_seconds(examples * layer.keys_values, T, link) / 2
        weights = min(layer.weights.size, dtype_bytes(dtype)) * layer.weights.count
        sent, summed = (
            (T - 1) * (size / link.bandwidth + link.latency)
            for size in (weights, layer.weights.trained_bytes)
        )
        # Backwards pass keys and values round again, with their gradients.
        return PassCost(hops + ring + sent, hops + 2 * ring + summed)


UNITS, POSITIONS = _Units(), _Positions()
# Parts of a sequence: as many devices as are fast to reach from one another.
MOST_PARTS = 16


def find(axis: ShardAxis | str) -> ShardAxis:
    """Returns the axis of a name.

    >>> find("positions").name
    'positions'

    Raises:
        ValueError: If there is none.
    """
    if isinstance(axis, ShardAxis):
        return axis
    known = {each.name: each for each in (UNITS, POSITIONS)}
    return known[argument_checks.check_choice("shard_axis", axis, [*known])]
