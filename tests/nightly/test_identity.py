"""As `tests/models/test_identity.py`, with triples in place of pairs."""

from __future__ import annotations

import pytest

from tests.helpers import identity, zoo

CASES = identity.cases(identity.ALL_FACTORS, strength=3)


@pytest.mark.parametrize("case", CASES, ids=zoo.title)
def test_every_triple_of_choices_trains_as_the_plain_model(case, floatx):
    floatx(case["dtype"])
    identity.assert_case(**case)
