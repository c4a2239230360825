"""The product: whatever is asked of it, a pipeline's step is the plain model's step."""

from __future__ import annotations

import pytest

from tests.helpers import zoo
from tests.helpers.identity import assert_case
from tests.helpers.identity_cases import FACTORS, cases


@pytest.mark.parametrize("case", cases(FACTORS), ids=zoo.title)
def test_every_pair_of_choices_trains_as_the_plain_model(case, floatx):
    floatx(case["dtype"])
    assert_case(**case)
