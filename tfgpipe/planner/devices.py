"""What an accelerator can do: a table that users extend with their own.

A device computes products at `efficiency` times the peak of its data sheet, moves bytes
through its memory, and sends bytes to others: fast within a group (a host's NVLink, a
slice's ICI), slower beyond. Own devices are in a TOML or JSON file, one table each, and
may say what differs from a known one alone:

    [my-h100]
    like = "h100-80g"
    efficiency = 0.71                              # measured

    [my-cpu.rates]                                 # measured: FLOP/s by rows
    forward = [[64, 31e9], [512, 66e9]]

Peaks, memory and links are those of NVIDIA's data sheets (P100, V100, A100, H100, H200)
and of Google Cloud's pages on its TPUs (a row is a core of v2 and v3, a chip of the
later ones). The way to a GPU's host is three quarters of its PCI Express: 16 lanes of
the third, fourth or fifth generation. `fusion_factor` and `temp_factor` are what
compilers make of blocks of a transformer and of convolutions, in float32 and bfloat16,
where there is a compiler to ask (`benchmarks.studies.compiled_costs`): XLA for an H100,
libtpu 0.0.52 for a v5e. All other ones, efficiencies and overheads are round guesses:
measure your own.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfgpipe.schedules import ActionKind

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A way from one device to another.

    Attributes:
        bandwidth: Bytes a second in each direction.
        latency: Seconds until the first byte is there.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        _check_positive(self, "bandwidth")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of accelerator.

    Attributes:
        name: Its name.
        flops: Peak FLOP/s of products, by the type they are computed in.
        memory: Bytes that it has.
        bandwidth: Bytes a second that it reads or writes.
        link: The way to other devices of its group.
        network: The way to those beyond.
        group: Number of devices that the fast link connects.
        network_cards: Number of network cards of a group in use at once, each by a
            ring of a collective of several groups: the group if each of its devices
            has one (NCCL's rings do so).
        efficiency: The share of the peak that large products reach.
        fusion_factor: Share of the memory traffic of element-wise operations that is
            left after fusion by a compiler: 1 without a compiler.
        temp_factor: Share of recomputed tensors and workspace, counted operation by
            operation, that a compiled backward holds: 1 without a compiler.
        reserved: Bytes that the runtime reserves.
        host_bandwidth: Bytes a second to the memory of the host, in each direction.
            None if microbatches cannot wait there.
        overhead: Seconds that an action takes beside its arithmetic.
        rates: Measured FLOP/s of a pass's products, by their number of rows, in place
            of peak and efficiency; reading the weights is then part of them.
        source: Origin of the figures.

    Raises:
        ValueError: If a number is not positive, or a share not between 0 and 1.
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    link: Link
    network: Link
    group: int = 8
    network_cards: int = 1
    efficiency: float = 0.6
    fusion_factor: float = 0.35
    temp_factor: float = 1.0
    reserved: float = 0.0
    host_bandwidth: float | None = None
    overhead: float = 0.0
    rates: Mapping[str, tuple[tuple[float, float], ...]] | None = None
    source: str = ""

    def __post_init__(self) -> None:
        _check_positive(self, "memory", "bandwidth", "group", "network_cards")
        for name in ("efficiency", "fusion_factor", "temp_factor"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"`{name}` of device '{self.name}' is a share, above 0 and at most "
                    f"1. Received {getattr(self, name)}."
                )

    def peak(self, dtype: str) -> float:
        """Returns the peak FLOP/s of products computed in a type.

        Raises:
            ValueError: If it is not known.
        """
        if dtype not in self.flops:
            raise ValueError(
                f"Device '{self.name}' has peaks for {', '.join(self.flops)}. Received "
                f"a model that computes in {dtype}. Add `flops.{dtype}` in a device "
                "file, or compute in another type."
            )
        return self.flops[dtype]

    def product_seconds(
        self, kind: ActionKind, flops: float, *, rows: float, weights: float, dtype: str
    ) -> float:
        """Returns the seconds of the products of a layer in one pass.

        Args:
            kind: Forward or backward.
            flops: Their FLOPs.
            rows: Rows of each.
            weights: Bytes of their weights, which are read once.
            dtype: Their dtype.
        """
        if self.rates is not None:
            return flops / _interpolate(self.rates[kind.name], rows)
        reached = self.peak(dtype) * self.efficiency
        return flops / reached + weights / self.bandwidth

    def link_across(self, span: int) -> Link:
        """Returns the slowest link among `span` neighbouring devices."""
        return self.link if span <= self.group else self.network

    def ring_link(self, num: int, *, stride: int = 1) -> Link:
        """Returns the link of a ring, over all cards that it has in a group.

        >>> device = dataclasses.replace(find("h100-80g"), network_cards=8)
        >>> [device.ring_link(16, stride=s).bandwidth / 1e9 for s in (1, 4, 8)]
        [400.0, 100.0, 50.0]

        Args:
            num: Number of devices on it.
            stride: Number of devices from each to the next.
        """
        link = self.link_across(num * stride)
        if link is not self.network:
            return link
        # As many rings as a stride has devices share them.
        cards = max(min(self.network_cards, self.group) // stride, 1)
        most = max(self.link.bandwidth, link.bandwidth)
        return dataclasses.replace(link, bandwidth=min(cards * link.bandwidth, most))


def _interpolate(points: tuple[tuple[float, float], ...], rows: float) -> float:
    """Returns the rate at some rows: linear in their logarithm, constant outside.

    >>> _interpolate(((64, 30.0), (256, 60.0)), 128)
    45.0
    """
    known_rows, rates = zip(*sorted(points), strict=True)
    return float(np.interp(np.log(rows), np.log(known_rows), rates))


def _check_positive(thing: Any, *names: str) -> None:
    for name in names:
        if not getattr(thing, name) > 0:
            raise ValueError(
                f"`{name}` of a {type(thing).__name__.lower()} is above 0. Received "
                f"{getattr(thing, name)}."
            )


def _gpu(
    name: str,
    memory: float,
    bandwidth: float,
    flops: dict[str, float],
    *,
    link: float,
    network: float,
    host: float,
    group: int = 8,
) -> Device:
    return Device(
        name=name,
        flops={dtype: 1e12 * peak for dtype, peak in flops.items()},
        memory=memory * GIB,
        bandwidth=1e9 * bandwidth,
        link=Link(bandwidth=1e9 * link, latency=5e-6),
        network=Link(bandwidth=1e9 * network, latency=20e-6),
        group=group,
        reserved=GIB,
        host_bandwidth=1e9 * host,
        overhead=100e-6,
        source=f"NVIDIA, data sheet of the {name.partition('-')[0].upper()}",
    )


def _tpu(
    name: str,
    memory: float,
    bandwidth: float,
    flops: float,
    *,
    link: float,
    group: int = 256,
) -> Device:
    """Returns a TPU, which computes float32 layers in bfloat16 by default."""
    return Device(
        name=name,
        flops={"float32": 1e12 * flops, "bfloat16": 1e12 * flops},
        memory=memory * GIB,
        bandwidth=1e9 * bandwidth,
        link=Link(bandwidth=1e9 * link, latency=2e-6),
        network=Link(bandwidth=6.25e9, latency=50e-6),
        group=group,
        overhead=20e-6,
        source=f"Google Cloud, system architecture of TPU {name.split('-')[1]}",
    )


def _halves(fast: float) -> dict[str, float]:
    return {"float16": fast, "bfloat16": fast}


_P100 = {"float32": 9.3, "float16": 18.7}
_V100 = {"float32": 15.7, "float16": 125}
_A100 = {"float32": 156, **_halves(312)}
_H100 = {"float32": 495, **_halves(989)}
_DEVICES = (
    _gpu("p100-16g", 16, 732, _P100, link=12, network=6, host=12),
    _gpu("v100-32g", 32, 900, _V100, link=150, network=12, host=12),
    _gpu("a100-40g", 40, 1555, _A100, link=300, network=25, host=24),
    _gpu("a100-80g", 80, 2039, _A100, link=300, network=25, host=24),
    _gpu("h100-80g", 80, 3350, _H100, link=450, network=50, host=48),
    _gpu("h200-141g", 141, 4800, _H100, link=450, network=50, host=48),
    _tpu("tpu-v2-8g", 8, 350, 22.5, link=62),
    _tpu("tpu-v3-16g", 16, 450, 61.5, link=82, group=1024),
    _tpu("tpu-v4-32g", 32, 1228, 275, link=50, group=4096),
    _tpu("tpu-v5e-16g", 16, 819, 197, link=50),
    _tpu("tpu-v5p-95g", 95, 2765, 459, link=100, group=8960),
    _tpu("tpu-v6e-32g", 32, 1600, 918, link=100),
    Device(
        name="cpu-core",
        flops={"float32": 80e9},
        memory=8 * GIB,
        bandwidth=10e9,
        link=Link(bandwidth=5e9, latency=20e-6),
        network=Link(bandwidth=0.5e9, latency=500e-6),
        group=64,
        fusion_factor=1.0,
        overhead=50e-6,
        source="one core at 2.5 GHz with AVX2; "
        "benchmarks/studies/planner.py measures yours",
    ),
)
# What compilers leave: `fusion_factor` and `temp_factor`, means of the blocks of
# `benchmarks.studies.compiled_costs`.
_BY_XLA = (0.26, 0.6)
_BY_LIBTPU = (0.12, 0.6)
_COMPILED = {
    **dict.fromkeys(("a100-40g", "a100-80g", "h100-80g", "h200-141g"), _BY_XLA),
    **dict.fromkeys(("tpu-v4-32g", "tpu-v5e-16g"), _BY_LIBTPU),
    **dict.fromkeys(("tpu-v5p-95g", "tpu-v6e-32g"), _BY_LIBTPU),
}
TABLE: Mapping[str, Device] = {
    device.name: dataclasses.replace(device, fusion_factor=fusion, temp_factor=temp)
    for device in _DEVICES
    for fusion, temp in [
        _COMPILED.get(device.name, (device.fusion_factor, device.temp_factor))
    ]
}
"""The known accelerators. NVIDIA's float32 is TF32, the default since Ampere."""


def find(name: str, table: Mapping[str, Device] = TABLE) -> Device:
    """Returns the device of a name.

    >>> find("h100-80g").memory / 2**30
    80.0

    Args:
        name: As in the table.
        table: The devices that there are.

    Raises:
        ValueError: If there is none; those there are, are named.
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"`device` is one of {', '.join(table)}. Received {name!r}.{hint} Describe "
        "your own in a file, --device_file=devices.toml."
    )


def read(path: str | Path) -> dict[str, Device]:
    """Returns the table with the devices of a TOML or JSON file added.

    Args:
        path: The file: see the top of this module.

    Raises:
        ValueError: If a table names a field that devices do not have, lacks one that
            they need, or is `like` an unknown device.
    """
    text = Path(path).read_text("utf-8")
    found = json.loads(text) if str(path).endswith(".json") else tomllib.loads(text)
    table = dict(TABLE)
    for name, values in found.items():
        table[name] = _described(name, dict(values), table)
    return table


def _described(
    name: str, values: dict[str, Any], table: Mapping[str, Device]
) -> Device:
    like = values.pop("like", None)
    known = [each.name for each in dataclasses.fields(Device) if each.name != "name"]
    for wrong in set(values) - set(known):
        raise ValueError(
            f"Device '{name}' is described by {', '.join(known)}, and `like` another. "
            f"Received `{wrong}`."
        )
    for link in {"link", "network"} & set(values):
        values[link] = Link(**values[link])
    if "rates" in values:
        values["rates"] = {
            which: tuple((float(rows), float(rate)) for rows, rate in points)
            for which, points in values["rates"].items()
        }
    if like is not None:
        return dataclasses.replace(find(like, table), name=name, **values)
    required = ("flops", "memory", "bandwidth", "link", "network")
    missing = ", ".join(each for each in required if each not in values)
    if missing:
        raise ValueError(
            f"Device '{name}' needs {', '.join(required)}. It lacks {missing}. "
            'Add them, or `like = "h100-80g"` for a device that is nearly the same.'
        )
    return Device(name=name, **values)
