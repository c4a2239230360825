"""Functions that are exported for JAX: their arguments, and what is compared."""

from __future__ import annotations

import functools
import json
import re

import numpy as np
import pytest

from tests.accelerator_check import run_exported
from tests.accelerator_check.run_exported import Array, Function

pytestmark = pytest.mark.pure

FUNCTION = Function(
    name="forward",
    model="some",
    file="007",
    arguments=(
        Array((300, 4), "float32"),
        Array((50,), "int32"),
        Array((), "int64"),
        Array((9,), "bool"),
    ),
    tolerance=1e-3,
    calls=2,
    scale=0.05,
)


def test_a_function_is_read_as_it_was_written():
    text = json.dumps(FUNCTION.to_json())
    assert Function.from_json(json.loads(text)) == FUNCTION


def test_arguments_are_drawn_the_same_again_and_each_its_own():
    floats, integers, single, truths = run_exported.arguments_of(FUNCTION)
    again = run_exported.arguments_of(Function.from_json(FUNCTION.to_json()))
    for one, other in zip((floats, integers, single, truths), again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.std(floats) == pytest.approx(0.05, rel=0.1)
    assert set(integers) == set(range(8))
    assert single in (0, 1)
    assert {*truths} == {True, False}
    wider = Function(**{**FUNCTION.__dict__, "arguments": FUNCTION.arguments[:1] * 2})
    one, other = run_exported.arguments_of(wider)
    assert np.max(np.abs(one - other)) > 0.05


def differs(expected, received) -> float:
    """Returns the difference of results, of a tolerance of 1e-3."""
    return run_exported.difference(
        run_exported.sampled(expected), run_exported.sampled(received), 1e-3
    )


def test_a_difference_is_in_units_of_what_is_tolerated():
    exact = np.array([1.0, 0.0, -2.0], np.float32)
    near = functools.partial(pytest.approx, rel=1e-4)
    assert differs([exact], [exact]) == 0
    # Of the entry itself, and of the largest.
    assert differs([exact], [exact + np.float32([3e-3, 0, 0])]) == near(1)
    assert differs([exact], [exact + np.float32([0, 4e-3, 0])]) == near(2)
    assert differs([exact], [exact * np.nan]) == np.inf
    assert differs([exact], [exact[:2]]) == np.inf
    assert differs([exact], [exact, exact]) == np.inf
    integers = np.arange(3)
    assert differs([integers], [integers]) == 0
    assert differs([integers], [integers + 1]) == np.inf


def test_what_is_nothing_but_rounding_is_compared_with_the_largest_result():
    large, noise = np.float32([100.0]), np.float32([1e-9])
    assert differs([large, noise], [large, -noise]) < 1
    assert differs([large, noise], [large, np.float32([1e-3])]) > 1


def test_a_wrong_entry_of_a_large_result_that_is_not_sampled_is_found_by_the_mean():
    large = np.ones(100_000, np.float32)
    wrong = np.where(np.arange(large.size) < 500, 10, large).astype(np.float32)
    assert run_exported.sampled([large])["0"].size == run_exported.NUM_SAMPLES
    assert differs([large], [wrong]) > 1


@pytest.mark.parametrize("bits", ["0D", "01000101"])
def test_constants_of_truth_values_are_written_the_other_way(bits):
    text = f'a = dense<"0x{bits}"> : tensor<2x2xi1>, dense<"0x0D"> : tensor<1xi8>'
    other = run_exported.repacked(text)
    assert other.endswith('dense<"0x0D"> : tensor<1xi8>')
    assert run_exported.repacked(other) != other
    values = re.findall(r'"0x([0-9A-F]+)"> : tensor<2x2xi1>', other)
    assert values == ["01000101" if bits == "0D" else "0D"]
