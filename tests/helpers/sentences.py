"""Pairs of sentences whose letters take one to four bytes."""

from __future__ import annotations

from tfgpipe_params.translate.text_pairs import Pair

SENTENCES = [
    Pair("Wie gehts?", "\u00bfQu\u00e9 tal?"),
    Pair("Gr\u00fc\u00dfe", "\u4f60\u597d"),
    Pair("ja", "\U0001f600"),
]
