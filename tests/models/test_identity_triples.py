"""As `tests/models/test_identity.py`, with triples in place of pairs.

Schedules that are not there have pairs. To find the triples takes seconds, which only
the night has.
"""

from __future__ import annotations

import pytest

from tests.helpers import zoo
from tests.helpers.identity import assert_case
from tests.helpers.identity_cases import ALL_FACTORS, OTHER_SCHEDULES, cases

pytestmark = pytest.mark.nightly

TRIPLES = cases(ALL_FACTORS, strength=3)
PAIRS = cases(OTHER_SCHEDULES)


@pytest.mark.parametrize("case", TRIPLES, ids=zoo.title)
def test_every_triple_of_choices_trains_as_the_plain_model(case, floatx):
    floatx(case["dtype"])
    assert_case(**case)


@pytest.mark.parametrize("case", PAIRS, ids=zoo.title)
def test_every_schedule_with_every_choice_trains_as_the_plain_model(case, floatx):
    floatx(case["dtype"])
    assert_case(**case)
