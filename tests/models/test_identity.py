"""The product: whatever is asked of it, a pipeline's step is the plain model's step."""

from __future__ import annotations

import pytest

from tests.helpers import identity, zoo


@pytest.mark.parametrize("case", identity.cases(identity.FACTORS), ids=zoo.title)
def test_every_pair_of_choices_trains_as_the_plain_model(case, floatx):
    floatx(case["dtype"])
    identity.assert_case(**case)
