"""One classifier, spread over devices in each of the ways that have a name."""

from __future__ import annotations

import pytest

import params
from tests.helpers import experiments

NAMES = [name for name in params.experiments() if name.startswith("classifier.")]
NAMES.remove("classifier.Alone")


@pytest.mark.parametrize("name", NAMES)
def test_spread_in_any_way_it_learns_the_same(name: str) -> None:
    experiments.check_that_it_learns_as_alone(name)
