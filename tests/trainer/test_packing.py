"""Documents packed into windows: every byte once, in order, with little room wasted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tfgpipe_params.lm import corpus

pytestmark = pytest.mark.pure

SIZES = st.integers(2, 12)
DOCUMENTS = st.lists(
    st.binary(min_size=1, max_size=40).map(lambda text: text.replace(b"\0", b"\1"))
)


def _pieces(windows: np.ndarray) -> list[bytes]:
    """Returns what stands behind each start, padding left out."""
    return [
        piece
        for window in windows
        for piece in window.tobytes().split(b"\0")[1:]
        if piece
    ]


@given(DOCUMENTS, SIZES)
def test_every_byte_is_there_once(documents: Sequence[bytes], size: int) -> None:
    windows = corpus.pack(documents, size=size)
    assert windows.shape[1:] == (size,)
    assert windows.dtype == np.uint8
    expected = [
        document[first : first + size - 1]
        for document in documents
        for first in range(0, len(document), size - 1)
    ]
    assert sorted(_pieces(windows)) == sorted(expected)


@given(DOCUMENTS, SIZES)
def test_only_what_is_longer_than_a_window_is_cut(
    documents: Sequence[bytes], size: int
) -> None:
    pieces = _pieces(corpus.pack(documents, size=size))
    for document in documents:
        if len(document) < size:
            assert document in pieces


@given(DOCUMENTS, SIZES)
def test_every_window_begins_with_a_start_and_ends_with_padding_if_any(
    documents: Sequence[bytes], size: int
) -> None:
    for window in corpus.pack(documents, size=size):
        assert window[0] == corpus.START
        assert b"\0\0" not in window.tobytes().rstrip(b"\0")


@given(st.lists(st.integers(1, 9)), st.integers(9, 20))
def test_bins_hold_everything_once_and_no_more_than_they_can(
    lengths: Sequence[int], size: int
) -> None:
    bins = corpus.best_fit(lengths, size=size)
    assert sorted(thing for bin_ in bins for thing in bin_) == list(range(len(lengths)))
    loads = [sum(lengths[thing] for thing in bin_) for bin_ in bins]
    assert all(0 < load <= size for load in loads)
    # No two bins could have been one, so all but one are more than half full.
    assert all(a + b > size for i, a in enumerate(loads) for b in loads[:i])


@example([7, 6, 3], 10)  # 7 + 3 and 6, not 7 and 6 + 3.
@given(st.lists(st.integers(1, 9)), st.integers(9, 20))
def test_the_longest_come_first_each_where_it_leaves_least_room(
    lengths: Sequence[int], size: int
) -> None:
    expected: list[int] = []
    for length in sorted(lengths, reverse=True):
        fullest = max((n for n in expected if n + length <= size), default=0)
        if fullest:
            expected.remove(fullest)
        expected.append(fullest + length)
    bins = corpus.best_fit(lengths, size=size)
    loads = [sum(lengths[thing] for thing in bin_) for bin_ in bins]
    assert sorted(loads) == sorted(expected)


def test_windows_by_hand() -> None:
    windows = corpus.pack([b"abcde", b"fg", b"h", b"ij"], size=5)
    assert [window.tobytes() for window in windows] == [
        b"\0abcd",
        b"\0fg\0h",
        b"\0ij\0e",
    ]


@pytest.mark.parametrize("size", [65, 129, 1025])
def test_little_room_is_wasted(size: int) -> None:
    random = np.random.default_rng(0)
    lengths = random.geometric(1 / 270, size=4000)  # About those of paragraphs.
    windows = corpus.pack([b"x" * n for n in lengths], size=size)
    pieces = sum(-(-n // (size - 1)) for n in lengths)
    assert windows.size - lengths.sum() - pieces < 0.01 * windows.size
