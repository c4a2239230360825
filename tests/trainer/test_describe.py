"""An experiment is described without TensorFlow."""

from __future__ import annotations

import pytest

from tests.helpers.subprocesses import interpret

pytestmark = pytest.mark.pure

PROGRAM = """
import sys
from tfgpipe_trainer.experiment import experiments as experiments_here
from tfgpipe_trainer.main import main
for name in experiments_here():
    status = main(["trainer", f"--params={name}", "--mode=describe"])
    assert not status, name
    assert not {"tensorflow", "keras"} & set(sys.modules), name
main(["trainer", "--params=lm.Tiny", "--mode=describe", "--set=model.num_layers=6"])
"""


def test_every_experiment_is_described_without_tensorflow() -> None:
    run = interpret(PROGRAM)
    assert (run.returncode, run.stderr) == (0, "")
    assert "data.first_year" in run.stdout  # Of translate.Dates.
    _, _, last = run.stdout.rpartition("lm.Tiny: ")
    (line,) = (li for li in last.splitlines() if li.startswith("model.num_la"))
    assert line.split(maxsplit=2) == [
        "model.num_layers",
        "6",
        "Number of transformer blocks.",
    ]
