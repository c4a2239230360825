"""Checks of arguments."""

from __future__ import annotations

import numpy as np
import pytest

from tfgpipe._util.argument_checks import check_count, check_memory_limit

pytestmark = pytest.mark.pure


def test_counts_are_integers_of_python_or_numpy():
    assert check_count("n", 3) == 3
    assert type(check_count("n", np.int32(3))) is int


@pytest.mark.parametrize("wrong", [True, 2.0, "2", None, 0, -1, np.float64(2), [1]])
def test_what_is_no_count_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=r"`n` must be an integer of at least 1\. Rec"):
        check_count("n", wrong)


def test_a_limit_is_told_to_those_who_pass_it():
    with pytest.raises(
        ValueError, match=r"at least 1 and at most 10\. Received 11\. Try"
    ):
        check_count("n", 11, most=10, hint=" Try fewer.")


def test_a_limit_of_memory_is_a_number_of_bytes():
    assert check_memory_limit(None) is None
    assert check_memory_limit(2.5e9) == 2.5e9
    assert check_memory_limit([1, 2.5e9]) == (1, 2.5e9)
    for wrong in (0, -1, float("nan"), float("inf"), "1G", [], [1, 0], [1, "1G"]):
        with pytest.raises(ValueError, match="`memory_limit` must be a number"):
            check_memory_limit(wrong)
