"""A run's losses are drawn, and a picture that cannot be stops nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tfgpipe_trainer import progress

pytestmark = pytest.mark.pure

RECORDS = [
    {"step": 10, "loss": 2.5, "learning_rate": 0.1},
    {"step": 20, "loss": 1.5, "learning_rate": 0.1},
    {"step": 20, "validation_loss": 1.75},
    {"step": 20, "validation_loss": 1.625, "final": True},
]


def draw(folder: Path, records: list[dict[str, float]]) -> None:
    progress.draw_losses(
        folder, records, baselines={"bigram": 2.0}, title="lm.Tiny", unit="byte"
    )


def test_what_is_measured_again_replaces_what_was() -> None:
    assert progress.curves(RECORDS) == {
        "training": [(10, 2.5), (20, 1.5)],
        "validation": [(20, 1.625)],
    }


def test_a_long_run_is_drawn_as_means() -> None:
    curve = [(5 * i, float(i % 2)) for i in range(1, 1001)]
    assert progress.means(curve) == [(50 * i, 0.5) for i in range(1, 101)]
    assert progress.means(curve[:100]) == curve[:100]


def test_losses_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "losses.png"
    draw(tmp_path, RECORDS)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"\nThe losses are drawn in {drawn}.\n"
    assert list(tmp_path.iterdir()) == [drawn]


def test_baselines_and_losses_are_in_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    draw(tmp_path, RECORDS)
    (axes,) = figures[0].axes
    drawn = {str(line.get_label()): list(line.get_ydata()) for line in axes.lines}
    assert drawn == {
        "training, 1.500 at the end": [2.5, 1.5],
        "validation, 1.625 at the end": [1.625],
        "bigram, 2.000": [2.0, 2.0],
    }


def test_a_run_without_losses_has_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(tmp_path, [{"step": 0, "learning_rate": 0.1}])
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_a_disk_that_takes_no_picture_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(tmp_path / "gone", RECORDS)
    told = "losses.png could not be written: No such file or directory."
    assert capsys.readouterr().err.strip() == told


def test_without_matplotlib_the_picture_is_left_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    draw(tmp_path, RECORDS)
    told = "No picture of losses: `pip install matplotlib` brings it.\n"
    assert capsys.readouterr().out == told
    assert not list(tmp_path.iterdir())
