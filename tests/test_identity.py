"""The product: whatever is asked of it, a pipeline's step is the plain model's step."""

from __future__ import annotations

from typing import Any

import pytest

from tests import pairs
from tests.identity import FACTORS, IMPOSSIBLE, assert_case

CASES = pairs.all_pairs(FACTORS, impossible=IMPOSSIBLE)


def named(case: tuple) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_every_pair_of_choices_trains_as_the_plain_model(case, floatx):
    chosen: dict[str, Any] = dict(zip(FACTORS, case, strict=True))
    floatx(chosen["dtype"])
    assert_case(**chosen)
