"""As `tests/test_identity.py`, with every triple of choices in place of every pair."""

from __future__ import annotations

import pytest

from tests import identity, zoo

CASES = identity.cases(identity.ALL_FACTORS, strength=3)


@pytest.mark.parametrize("case", CASES, ids=zoo.title)
def test_every_triple_of_choices_trains_as_the_plain_model(case, floatx):
    floatx(case["dtype"])
    identity.assert_case(**case)
