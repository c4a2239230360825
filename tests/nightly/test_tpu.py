"""Train steps for TPUs that are not there: more schedules than the gate has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests import tpu_steps
from tests.tpu_steps import Traced


@pytest.fixture(scope="module", params=tpu_steps.FACES, ids=str)
def traced(request: pytest.FixtureRequest) -> Traced:
    return Traced(**request.param)


@pytest.mark.parametrize("check", tpu_steps.CHECKS, ids=lambda x: x.__name__)
def test_of_a_train_step(check: Callable[[Traced], None], traced: Traced) -> None:
    check(traced)


@pytest.mark.parametrize(
    ("schedule", "remat"), [("1f1b", "stage"), ("zero_bubble", "none")]
)
def test_compiled_by_xla_the_programs_of_the_cores_give_the_same(
    schedule: Any, remat: Any, floatx: Any
) -> None:
    floatx("float64")
    tpu_steps.assert_programs_by_xla_give_the_same(schedule, remat)
