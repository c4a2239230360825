"""One classifier, spread over devices in each of the ways that have a name."""

from __future__ import annotations

import pytest

from tests.helpers import experiments
from tfgpipe_trainer.experiment import experiments as experiments_here

NAMES = [name for name in experiments_here() if name.startswith("parallelism.")]
NAMES.remove("parallelism.SingleDevice")


@pytest.mark.parametrize("name", NAMES)
def test_spread_in_any_way_it_learns_the_same(name: str) -> None:
    experiments.check_that_it_learns_as_alone(name)
