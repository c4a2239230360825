"""ZeRO assignment: which replica owns a weight or slot that is not copied."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class ZeroAssignment:
    """Assigns keys to devices, each to the device that holds the fewest bytes.

    The result depends on the order of the calls alone, so processes that call in the
    same order agree.
    """

    def __init__(self) -> None:
        self._held: collections.Counter[str] = collections.Counter()
        self._owners: dict[Hashable, _Owner] = {}

    def __contains__(self, key: Hashable) -> bool:
        """Returns whether something has an owner."""
        return key in self._owners

    def owner(self, key: Hashable, devices: Sequence[str], num_bytes: int) -> int:
        """Returns the position of the device of a key, of these devices the same."""
        if key in self._owners and self._owners[key].device not in devices:
            self.release(key)  # It has moved.
        if key not in self._owners:
            held = [self._held[device] for device in devices]
            owner = held.index(min(held))
            self._held[devices[owner]] += num_bytes
            self._owners[key] = _Owner(owner, devices[owner], num_bytes)
        return self._owners[key].replica

    def release(self, key: Hashable) -> None:
        """Removes something that no longer exists."""
        owner = self._owners.pop(key)
        self._held[owner.device] -= owner.num_bytes


class _Owner(NamedTuple):
    replica: int
    device: str
    num_bytes: int
