"""As `tests/test_identity.py`, with every triple of choices in place of every pair."""

from __future__ import annotations

from typing import Any

import pytest

from tests import pairs
from tests.identity import FACTORS, IMPOSSIBLE, assert_case

MORE = {**FACTORS, "num_microbatches": (1, 2, 3, 5, 8)}
CASES = pairs.all_pairs(MORE, impossible=IMPOSSIBLE, strength=3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_triple_of_choices_trains_as_the_plain_model(case, floatx):
    chosen: dict[str, Any] = dict(zip(MORE, case, strict=True))
    floatx(chosen["dtype"])
    assert_case(**chosen)
