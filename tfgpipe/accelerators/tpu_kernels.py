"""The kernels of TensorFlow's build for TPUs, in a table, as that build is elsewhere.

`tensorflow-tpu` registers for a TPU what passes data on, reads and assigns variables
and calls functions that XLA has compiled, and for any device operations on integers in
the host's memory. What it compiles on demand, one operation at a time, it registers
only once there is a TPU. In an environment with that package

    python -c "from tfgpipe.accelerators import tpu_kernels; tpu_kernels.write()"

writes the table: operation, type of device, types of each attribute, and arguments in
the host's memory.

    Identity TPU T=bfloat16,bool,complex64
    Fill DEFAULT T=int32 index_type=int32 host=dims,output,value
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tensorflow as tf

from tfgpipe._compat import kernels

_TABLE = Path(__file__).with_suffix(".txt")
_DEVICES = ("DEFAULT", "TPU")


@functools.cache
def table() -> Mapping[str, Sequence[kernels.Kernel]]:
    """Returns the kernels of the table by operation."""
    found = collections.defaultdict(list)
    for line in _TABLE.read_text("utf-8").splitlines():
        op, device, *parts = line.split()
        named = dict(part.split("=") for part in parts)
        host = named.pop("host", "")
        types = {
            name: frozenset(tf.as_dtype(x).as_datatype_enum for x in names.split(","))
            for name, names in named.items()
        }
        found[op].append(kernels.Kernel(device, types, frozenset(host.split(",")), 0))
    return found


def write() -> None:
    """Writes the table, of the TensorFlow that is installed."""
    _TABLE.write_text("".join(f"{line}\n" for line in lines()), "utf-8")


def lines() -> Iterator[str]:
    """Yields the lines of the table, of the TensorFlow that is installed."""
    for op in kernels.operations_with_kernels():
        groups = collections.defaultdict(set)
        for kernel in kernels.registered_kernels(op):
            if kernel.device in _DEVICES:
                types = tuple(sorted(kernel.types.items()))
                groups[kernel.device, tuple(sorted(kernel.host_arguments))].add(types)
        for (device, host), kinds in sorted(groups.items()):
            host_part = [f"host={','.join(host)}"] if host else []
            for kind in sorted(map(_types, _joined(kinds))):
                yield " ".join([op, device, *kind, *host_part])


_Types = tuple[tuple[str, frozenset[int]], ...]


def _joined(kinds: set[_Types]) -> set[_Types]:
    """Joins kernels for all combinations of some types into one."""
    union: dict[str, set[int]] = collections.defaultdict(set)
    for kind in kinds:
        for name, types in kind:
            union[name] |= types
    covered = sum(math.prod(len(types) for _, types in kind) for kind in kinds)
    if covered != math.prod(map(len, union.values())):
        return kinds
    return {tuple((name, frozenset(types)) for name, types in union.items())}


def _types(kind: _Types) -> list[str]:
    return [
        f"{name}={','.join(sorted(tf.as_dtype(x).name for x in types))}"
        for name, types in kind
    ]
