"""Batches of pairs of texts: what is read, and what is to be predicted."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tests.pure.trainer.test_text_pairs import SENTENCES
from trainer.data import text_pairs
from trainer.data.text_pairs import Pair

PAIRS = [Pair("ab", "1"), Pair("c", "234"), Pair("", "5")]


def test_a_target_is_predicted_from_what_stands_before() -> None:
    rows = text_pairs.encode_pairs(PAIRS, source_length=3, target_length=4)
    end, start = text_pairs.END, text_pairs.START
    one, two, three, four, five = text_pairs.encode_texts(["12345"], length=5)[0]
    assert rows.target.tolist() == [
        [one, end, 0, 0],
        [two, three, four, end],
        [five, end, 0, 0],
    ]
    assert rows.shifted.tolist() == [
        [start, one, 0, 0],
        [start, two, three, four],
        [start, five, 0, 0],
    ]
    # So that the mask of what is read is the mask of what counts.
    assert np.array_equal(rows.shifted > 0, rows.target > 0)
    assert [text_pairs.decode_text(row) for row in rows.source] == ["ab", "c", ""]


def _batches(**changes: object) -> list[Any]:
    rows = text_pairs.encode_pairs(PAIRS, source_length=3, target_length=4)
    arguments = {"batch_size": 5, "steps": range(6), "seed": 1, **changes}
    dataset = text_pairs.random_pair_batches(rows, **arguments)
    return list(dataset.as_numpy_iterator())


def _flat(batch: Any) -> list[np.ndarray]:
    (source, shifted), target = batch
    return [source, shifted, target]


def test_the_batch_of_a_step_depends_on_seed_and_step_alone() -> None:
    from_zero, from_four = _batches(), _batches(steps=range(4, 6))
    assert len(from_four) == 2
    for late, early in zip(from_four, from_zero[4:], strict=True):
        assert all(map(np.array_equal, _flat(late), _flat(early)))
    sources = [batch[0][0].tolist() for batch in from_zero]
    assert all(a != b for a, b in itertools.pairwise(sources))
    assert _batches(seed=2)[0][0][0].tolist() != sources[0]


def test_rows_of_a_batch_belong_together() -> None:
    rows = text_pairs.encode_pairs(PAIRS, source_length=3, target_length=4)
    table = {
        s.tobytes(): t.tobytes() for s, t in zip(rows.source, rows.target, strict=True)
    }
    for (source, _), target in _batches():
        for s, t in zip(source, target, strict=True):
            assert table[s.tobytes()] == t.tobytes()


def test_validation_takes_whole_batches_of_the_first_pairs() -> None:
    rows = text_pairs.encode_pairs(PAIRS, source_length=3, target_length=4)
    ((inputs, target),) = text_pairs.first_pair_batches(
        rows, batch_size=2, num_batches=5
    ).as_numpy_iterator()
    assert np.array_equal(inputs[0], rows.source[:2])
    assert np.array_equal(target, rows.target[:2])


def test_sentences_come_back_from_their_bytes() -> None:
    table = text_pairs.encode_pairs(
        SENTENCES, source_length=12, target_length=14, alphabet=text_pairs.UTF8
    )
    for pair, source, shifted, target in zip(
        SENTENCES, table.source, table.shifted, table.target, strict=True
    ):
        assert text_pairs.decode_text(source, text_pairs.UTF8) == pair.source
        assert text_pairs.decode_text(target, text_pairs.UTF8) == pair.target
        assert text_pairs.decode_text(shifted[1:], text_pairs.UTF8) == pair.target
        assert target.tolist().index(text_pairs.END) == len(pair.target.encode())
        assert target.max() < text_pairs.UTF8.size
