"""Former names of modules."""

from __future__ import annotations

import pytest

from tests.helpers import subprocesses


@pytest.mark.parametrize(
    "statement",
    ["from trainer.config import Training", "from params import lm", "import params"],
)
def test_former_names_of_modules_are_refused_with_the_new_one(statement: str) -> None:
    run = subprocesses.interpret(statement)
    assert run.returncode == 1
    name = statement.split()[1]
    assert f"Expected an import from tfgpipe_{name}; received" in run.stderr
