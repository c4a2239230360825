"""Which of several replicas keeps what is kept once."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Ownership:
    """Shares things out over devices, each to the one that has least.

    The order in which they are asked for decides, so that processes that ask in the
    same order agree.
    """

    def __init__(self) -> None:
        self._held: collections.Counter[str] = collections.Counter()
        self._owners: dict[Hashable, _Owner] = {}

    def __contains__(self, key: Hashable) -> bool:
        """Returns whether something has an owner."""
        return key in self._owners

    def take(self, devices: Sequence[str], num_bytes: int) -> int:
        """Returns the position of the device that something new goes to."""
        held = [self._held[device] for device in devices]
        owner = held.index(min(held))
        self._held[devices[owner]] += num_bytes
        return owner

    def of(self, key: Hashable, devices: Sequence[str], num_bytes: int) -> int:
        """Returns the position of the device that something is on, always the same."""
        if key not in self._owners:
            number = self.take(devices, num_bytes)
            self._owners[key] = _Owner(number, devices[number], num_bytes)
        return self._owners[key].number

    def release(self, key: Hashable) -> None:
        """Forgets something that is gone."""
        owner = self._owners.pop(key)
        self._held[owner.device] -= owner.num_bytes


class _Owner(NamedTuple):
    number: int
    device: str
    num_bytes: int
