"""Rematerialisation of what is cheap to compute again for the bytes that it takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from tfgpipe._util import argument_checks, readable_bytes
from tfgpipe.remat.forward_graph import DeviceStages, ForwardGraph
from tfgpipe.remat.min_cut import cheapest_saved
from tfgpipe.remat.policy import Remat

# Choices of a stage that are tried at most.
_MAX_CHOICES = 16

# Part that the last operation of a stage counts as dearer than the first. Equal layers
# would all be saved at the same price, or none.
_TILT = 0.02


@dataclasses.dataclass(frozen=True)
class AutoRemat(Remat):
    """Saves a result if computing it again takes more FLOPs than its bytes are worth.

    What is saved is a minimum cut of each stage's joint graph: no other choice of as
    many bytes recomputes 2% less. What a byte is worth is found for each stage when it
    is traced, on the shapes of its microbatches: as little is recomputed as there is
    memory for.

    >>> tfgpipe.remat.AutoRemat(flops_per_byte=100)
    AutoRemat(flops_per_byte=100, memory_limit=None)

    Attributes:
        flops_per_byte: FLOPs that a saved byte must spare: 0 saves all, infinity
            nothing. A byte that an operation reads or writes counts as 16 FLOPs. None
            to find it.
        memory_limit: Bytes of a device, or of each, as in `PipelineConfig`. None for
            what the fullest one needs with `remat="stage"`, whose backward holds what
            it recomputes.
    """

    name = "auto"

    flops_per_byte: float | None = None
    memory_limit: argument_checks.MemoryLimit = None

    def __post_init__(self) -> None:
        limit = argument_checks.check_memory_limit(self.memory_limit)
        object.__setattr__(self, "memory_limit", limit)  # It has a hash.
        price = self.flops_per_byte
        if price is not None and not price >= 0:
            raise ValueError(
                "`flops_per_byte` must be at least 0, or None to find it. Received "
                f"{price!r}. 0 saves all, infinity nothing."
            )

    @property
    def saves_results(self) -> bool:
        """True once it is known what a byte is worth."""
        return self.flops_per_byte is not None

    def saved(self, graph: ForwardGraph) -> Collection[str]:
        """Returns the results to save: none as long as no FLOPs a byte are known."""
        price = self.flops_per_byte
        if price is None or price == float("inf"):
            return ()
        return cheapest_saved(_tilted(graph), price)

    @property
    def fills_memory(self) -> bool:
        """True unless it is known what a byte is worth."""
        return self.flops_per_byte is None

    def within(self, memory_limit: argument_checks.MemoryLimit) -> AutoRemat:
        """Returns the policy for a limit, unless it has one."""
        if self.flops_per_byte is not None or self.memory_limit is not None:
            return self
        return dataclasses.replace(self, memory_limit=memory_limit)

    def for_stages(
        self, num_stages: int, devices: Callable[[], Sequence[DeviceStages]]
    ) -> tuple[Remat, ...]:
        """Returns the policy of each stage with which least is recomputed.

        Args:
            num_stages: The number of stages.
            devices: Returns what the stages of each device hold.

        Raises:
            ValueError: If a device has too little memory, or the number of examples
                is not known.
        """
        if self.flops_per_byte is not None:
            return (self,) * num_stages
        choices: dict[int, list[_Choice]] = {}
        each = []
        for device in devices():
            for graph in device.graphs.values():
                if id(graph) not in choices:  # Equal stages share a graph.
                    splits = device.splits_backwards
                    choices[id(graph)] = [*_choices(graph, splits=splits)]
            own = {k: choices[id(graph)] for k, graph in device.graphs.items()}
            each.append(_Device(device, own))
        found: dict[int, float] = {}
        for p, one in enumerate(each):
            found |= one.least_recomputation(self._limit(p, each))
        return tuple(AutoRemat(found[k]) for k in range(num_stages))

    def _limit(self, p: int, all_devices: Sequence[_Device]) -> float:
        """Returns the bytes of a device."""
        device = all_devices[p]
        if self.memory_limit is None and device.knows_sizes:
            return max(each.bytes_if_nothing_is_saved for each in all_devices)
        if self.memory_limit is None:
            return device.bytes_if_nothing_is_saved
        if device.knows_sizes:
            name, P = "memory_limit", len(all_devices)
            limits = argument_checks.of_each_device(
                name, self.memory_limit, P, math.inf
            )
            return limits[p]
        raise ValueError(
            '`remat="auto"` within `memory_limit` must know the number of examples of '
            "a mini-batch. Received a mini-batch of any number. Use "
            "`dataset.batch(size, drop_remainder=True)`, or pass "
            "`remat=tfgpipe.remat.AutoRemat(flops_per_byte=...)`."
        )


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A choice of the results that the forward of a stage saves.

    Attributes:
        flops_per_byte: FLOPs that a saved byte spares at least.
        saved: Bytes that each microbatch in flight holds beside the stage's inputs.
        recomputed: The most bytes of recomputed tensors at once, in a backward.
        flops: FLOPs that the backward of a microbatch recomputes.
    """

    flops_per_byte: float
    saved: float
    recomputed: float
    flops: float


def _tilted(graph: ForwardGraph) -> ForwardGraph:
    """Returns a graph whose later operations are a little dearer."""
    dearer = {x: 1 + _TILT * i / len(graph.types) for i, x in enumerate(graph.types)}
    return dataclasses.replace(graph, cost=lambda name: dearer[name] * graph.cost(name))


def _choices(graph: ForwardGraph, *, splits: bool) -> Iterator[_Choice]:
    """Yields the choices that no others are better than, at any price of a byte.

    Between two of them, the price at which they cost the same finds whether there is
    another.

    Args:
        graph: The operations.
        splits: True if what both halves of a backward read is held between them.
    """
    cost = _tilted(graph).cost
    operations = {x: name for name, made in graph.results.items() for x in made}

    def choice(price: float) -> _Choice:
        saved = {*AutoRemat(price).saved(graph)}
        there, pending = {*saved}, [*graph.wanted]
        again = set()
        while pending:
            tensor = pending.pop()
            if tensor not in there:
                there.add(tensor)
                again.add(operations[tensor])
                pending += graph.reads[operations[tensor]]
        between = sum(graph.sizes[x] for x in graph.wanted if x not in saved)
        return _Choice(
            price,
            sum(graph.sizes[x] for x in saved),
            max(graph.peak_bytes(saved), splits * between),
            sum(map(cost, again)),
        )

    most, least = choice(0.0), choice(float("inf"))
    yield from (most, least)
    pending, left = [(most, least)], _MAX_CHOICES
    while pending and left:
        more, less = pending.pop(0)
        if more.saved <= less.saved:
            continue
        between = choice((less.flops - more.flops) / (more.saved - less.saved))
        left -= 1
        if less.saved < between.saved < more.saved:
            yield between
            pending += [(more, between), (between, less)]


class _Device:
    """A device whose stages choose what to save.

    Args:
        device: The device.
        choices: By stage, what its forward may save.
    """

    def __init__(
        self, device: DeviceStages, choices: Mapping[int, Sequence[_Choice]]
    ) -> None:
        self._device = device
        self._choices = choices
        self._nothing = {
            k: next(x for x in each if x.flops_per_byte == float("inf"))
            for k, each in choices.items()
        }

    @property
    def knows_sizes(self) -> bool:
        """True if the number of examples is known."""
        return self._device.fixed_bytes is not None

    @property
    def bytes_if_nothing_is_saved(self) -> float:
        """The bytes that the device takes with `remat="stage"`."""
        return self._bytes(self._nothing)

    def least_recomputation(self, limit: float) -> dict[int, float]:
        """Returns the FLOPs a byte of each stage, from the leanest choices upwards.

        One stage is stepped after the other, that first which spares most FLOPs for
        each byte that the device then holds more.

        Args:
            limit: Bytes of the device.
        """
        leanest = {}
        for k, choices in self._choices.items():
            held = [(self._bytes({k: x}), x.flops) for x in choices]
            leanest[k] = choices[held.index(min(held))]
        # Stages on one device share the memory for what is recomputed.
        chosen = min(self._nothing, leanest, key=self._bytes)
        least = self._bytes(chosen)
        if least > limit:
            raise ValueError(
                f"A device needs {readable_bytes(least)} if its forwards save as "
                f"little as they can. Received memory_limit={limit:,.0f}. Use more "
                "stages or microbatches, or a schedule with fewer of them in flight."
            )
        while steps := [
            (self._spared(chosen, k, x), k, i)
            for k, choices in self._choices.items()
            for i, x in enumerate(choices)
            if x.flops < chosen[k].flops and self._bytes({**chosen, k: x}) <= limit
        ]:
            _, k, i = max(steps)
            chosen[k] = self._choices[k][i]
        return {k: x.flops_per_byte for k, x in chosen.items()}

    def _spared(self, chosen: Mapping[int, _Choice], k: int, other: _Choice) -> float:
        more = self._bytes({**chosen, k: other}) - self._bytes(chosen)
        return (chosen[k].flops - other.flops) / max(more, 1.0)

    def _bytes(self, chosen: Mapping[int, _Choice]) -> float:
        device = self._device
        held = sum(device.in_flight[k] * x.saved for k, x in chosen.items())
        again = max(device.in_backward[k] * x.recomputed for k, x in chosen.items())
        return (device.fixed_bytes or 0.0) + held + again
