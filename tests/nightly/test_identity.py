"""As `tests/test_identity.py`, with every triple of choices in place of every pair."""

from __future__ import annotations

from typing import Any

import pytest

from tests import pairs
from tests.identity import ALL_FACTORS, IMPOSSIBLE, assert_case

CASES = pairs.all_pairs(ALL_FACTORS, impossible=IMPOSSIBLE, strength=3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_triple_of_choices_trains_as_the_plain_model(case, floatx):
    chosen: dict[str, Any] = dict(zip(ALL_FACTORS, case, strict=True))
    floatx(chosen["dtype"])
    assert_case(**chosen)
