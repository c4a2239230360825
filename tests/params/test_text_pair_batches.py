"""Batches of pairs of texts: what is read, and what is to be predicted."""

from __future__ import annotations

import numpy as np

from tests.helpers.sentences import SENTENCES
from tfgpipe_params.translate import text_pairs
from tfgpipe_params.translate.text_pairs import Pair

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
