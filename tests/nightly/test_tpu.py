"""Programs on cores of a TPU, compiled by XLA, of a schedule that cuts backward."""

from __future__ import annotations

from typing import Any

from tests.helpers.xla import assert_programs_by_xla_give_the_same


def test_compiled_by_xla_the_programs_of_the_cores_give_the_same(floatx: Any) -> None:
    floatx("float64")
    assert_programs_by_xla_give_the_same("zero_bubble", "none")
