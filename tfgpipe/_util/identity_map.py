"""A mapping keyed by identity, for objects that define equality of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class IdentityMap(MutableMapping[K, V], Generic[K, V]):
    """A dictionary whose keys are the objects themselves, whatever they equal.

    Keras variables compare element by element and cannot be keys of a `dict`. Keys are
    kept alive, so that the identity of one is never that of another; they come in the
    order in which they were added.

    >>> a, b = [1], [1]
    >>> found = IdentityMap([(a, "first"), (b, "second")])
    >>> found[a], found[b], [1] in found
    ('first', 'second', False)
    """

    def __init__(self, items: Iterable[tuple[K, V]] = ()) -> None:
        self._items: dict[int, tuple[K, V]] = {}
        for key, value in items:
            self[key] = value

    def __getitem__(self, key: K) -> V:
        # A KeyError has the id: `repr` of a variable would read all its values.
        return self._items[id(key)][1]

    def __setitem__(self, key: K, value: V) -> None:
        self._items[id(key)] = (key, value)

    def __delitem__(self, key: K) -> None:
        del self._items[id(key)]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._items

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)


def unique(items: Iterable[K]) -> list[K]:
    """Returns objects, each once, in the order in which they first occur.

    >>> a, b = [1], [1]
    >>> unique([a, b, a])
    [[1], [1]]
    """
    return list(IdentityMap((item, None) for item in items))
