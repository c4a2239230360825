"""Kinds of parallelism together; all cases are in tests/nightly."""

from __future__ import annotations

import pytest

from tests.tensor_parallel import composition


@pytest.mark.parametrize("case", [composition.CASES[i] for i in (1, 7)], ids=str)
def test_together_they_train_as_one_device(floatx, case):
    floatx("float64")
    composition.assert_trains_as_one_device(*case)
