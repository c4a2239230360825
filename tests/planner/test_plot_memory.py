"""The picture of memory shows each part of each device."""

from __future__ import annotations

import pytest

from tests.helpers.planner_toys import TOY, config, request, workload

pytestmark = pytest.mark.pure


def test_each_part_is_a_bar_as_long_as_its_bytes(tmp_path):
    asked = request(workload(8))
    found = asked.estimate(
        config(num_devices=4, num_microbatches=4, remat="stage", schedule="1f1b")
    )
    path = tmp_path / "memory.svg"
    figure = found.plot_memory(path=path)
    assert path.exists()
    (axes,) = figure.axes
    bars = {bar.get_label(): bar for bar in axes.containers}
    shown = {
        name for name in found.fullest.parts if any(m.parts[name] for m in found.memory)
    }
    assert set(bars) == shown
    assert "recomputed" in shown
    for name, bar in bars.items():
        widths = [patch.get_width() * 2**30 for patch in bar.patches]
        assert widths == pytest.approx([held.parts[name] for held in found.memory])
    (capacity,) = axes.lines
    assert capacity.get_xdata()[0] * 2**30 == pytest.approx(TOY.memory)
