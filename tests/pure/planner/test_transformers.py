"""Sizes of a transformer, as a workload."""

from __future__ import annotations

import pytest

from tfgpipe.planner.transformers import transformer

SIZES = {
    "name": "lm",
    "num_layers": 2,
    "width": 64,
    "mlp_width": 256,
    "num_heads": 4,
    "length": 16,
    "vocabulary": 100,
}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_layers": 0}, "`num_layers` must be an integer of at least 1"),
        ({"num_heads": 5}, "must divide `width`. Received num_heads=5 and width=64"),
        ({"dtype": "float99"}, "`dtype` must be one of 'float32', .* 'float99'"),
    ],
)
def test_sizes_that_no_transformer_has_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        transformer(**{**SIZES, **wrong})
