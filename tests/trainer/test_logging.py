"""What `Logging` records of the steps of a run, and shows of them."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers import runs
from tfgpipe_trainer.callbacks import Logging
from tfgpipe_trainer.checkpoint.run_state import RunState
from tfgpipe_trainer.config import Training
from tfgpipe_trainer.progress import Progress
from tfgpipe_trainer.writers import Metrics


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _log(
    folder: Path,
    losses: list[float],
    *,
    notes: RunState,
    stream: io.StringIO,
    first_step: int = 0,
) -> None:
    """Ends a step for each loss, of a run of ten steps. A metric is its tenth."""
    experiment: Any = SimpleNamespace(
        training=Training(num_steps=10, log_every=4), units_per_step=8, unit="byte"
    )
    folder.mkdir(exist_ok=True)
    metrics = Metrics(folder, step=first_step)
    measures: Any = SimpleNamespace(begin=lambda: None, end=lambda seconds: {})
    with Progress(stream) as progress:
        logging = Logging(
            experiment, metrics, progress, notes, measures, first_step=first_step
        )
        logging.set_model(SimpleNamespace(optimizer=SimpleNamespace(learning_rate=0.5)))
        for step, loss in enumerate(losses, first_step + 1):
            logging.on_train_batch_begin(step - first_step - 1)
            logs = {"loss": loss, "tenth": loss / 10, "vector": np.ones(2)}
            logging.on_train_batch_end(step - first_step - 1, logs)


def test_a_record_has_the_mean_since_the_one_before(tmp_path: Path) -> None:
    losses = [4.0, 3.0, 2.0, 3.0, 1.0, math.nan, 2.0, 3.0, 0.5, 1.5]
    stream = io.StringIO()
    _log(tmp_path, losses, notes=RunState(), stream=stream)
    # A step that is not finite is left out.
    assert runs.losses(tmp_path) == [(4, 3.0), (8, 2.0), (10, 1.0)]
    tenths = [(x["step"], x["tenth"]) for x in runs.records(tmp_path)]
    assert tenths == [(4, pytest.approx(0.3)), (8, pytest.approx(0.2)), (10, 0.1)]
    lines = stream.getvalue().splitlines()
    assert all("learning rate 5.00e-01" in line for line in lines)
    assert len(lines) == 9  # All but the first, which is traced.
    assert "step  3/10  loss 3.0000  " in lines[1]  # Of three steps.
    assert "step  5/10  loss 1.0000  " in lines[3]  # After a record.
    lines = [lines[step - 2] for step in (4, 8, 10)]
    assert "  loss 3.0000  tenth 0.3000  learning rate" in lines[0]
    assert "vector" not in lines[0]
    assert all(re.search(r" left  process [\d.]+ [MG]iB$", line) for line in lines)
    assert [re.findall(r"  loss (\S+)", line) for line in lines] == [
        ["3.0000"],
        ["2.0000"],
        ["1.0000"],
    ]


def test_a_mean_goes_on_where_a_run_does(tmp_path: Path) -> None:
    losses = [0.1 * n for n in range(10)]
    notes, stream = RunState(), io.StringIO()
    _log(tmp_path / "whole", losses, notes=RunState(), stream=stream)
    _log(tmp_path / "stopped", losses[:6], notes=notes, stream=stream)
    again = RunState.read(notes.written())
    _log(tmp_path / "stopped", losses[6:], notes=again, stream=stream, first_step=6)
    assert runs.losses(tmp_path / "stopped") == runs.losses(tmp_path / "whole")
    one, other = (
        [each["tenth"] for each in runs.records(tmp_path / name)]
        for name in ("whole", "stopped")
    )
    assert one == other


def test_a_live_line_has_a_smooth_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = _Terminal()
    _log(tmp_path, [2.0] * 9 + [1.0], notes=RunState(), stream=terminal)
    assert "step 10/10  loss 1.9000  " in terminal.getvalue()
    assert "learning rate" not in terminal.getvalue()
    assert "nan" not in terminal.getvalue()
    assert "tenth 0." in terminal.getvalue()
    assert "\n" not in terminal.getvalue().partition("step 10/10")[0]
