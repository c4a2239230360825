"""All kinds of parallelism together, on up to eight devices."""

from __future__ import annotations

import pytest

from tests.tensor_parallel import composition


@pytest.mark.parametrize("case", composition.CASES, ids=str)
def test_together_they_train_as_one_device(floatx, case):
    floatx("float64")
    composition.assert_trains_as_one_device(*case)
