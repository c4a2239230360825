"""Pictures: what they name, and that all of it can be read."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from tests.helpers.subprocesses import interpret
from tfgpipe import schedules
from tfgpipe.report.memory import DeviceMemory
from tfgpipe.report.plots import (
    plot_bubbles,
    plot_differences,
    plot_gpipe_bubbles,
    plot_memory,
    plot_mesh,
    plot_peaks,
    plot_schedule,
    plot_timelines,
)
from tfgpipe.simulation.simulator import Costs, costs_of, simulate

pytestmark = pytest.mark.pure

MILLISECONDS = Costs(forward=1e-3, backward=2e-3, recompute=1e-3)


def theory_and_measurement():
    measured = simulate(
        schedules.one_f_one_b(4, 8), dataclasses.replace(MILLISECONDS, latency=2e-4)
    ).timeline
    measured = dataclasses.replace(measured, title="measured")
    theory = simulate(measured.schedule, costs_of(measured)).timeline
    return [dataclasses.replace(theory, title="theory"), measured]


def measured_bubbles():
    """Steps whose bubble is a little above the formula's."""
    return [
        simulate(schedules.gpipe(K, M), Costs(latency=0.1)).timeline
        for K, M in [(2, 1), (2, 8), (4, 4)]
    ]


PEAKS = {
    "kept": {"stage 0": 90 * 2**20, "stage 1": 85.5 * 2**20},
    "recomputed": {"stage 0": 12 * 2**20, "stage 1": 3 * 2**10},
}
DIFFERENCES = {
    "K=2, M=4": {f"dense_{i}/kernel": 10.0 ** (i - 17) for i in range(4)},
    "K=4, M=8": {f"dense_{i}/kernel": 0.0 for i in range(4)},
}

# Two replicas of three stages, one of them in two shards.
MESH = [
    [
        [
            DeviceMemory(
                f"GPU:{4 * d + k + t}", f"layer_{k}0 .. layer_{k}9 (10)", 10**9, None
            )
            for t in range(2 if k == 2 else 1)
        ]
        for k in range(3)
    ]
    for d in range(2)
]

DRAWN = {
    "gpipe": lambda path=None: plot_schedule(schedules.gpipe(4, 8), path=path),
    "zero_bubble": lambda path=None: plot_schedule(
        schedules.find("zero_bubble")(4, 8), costs=MILLISECONDS, path=path
    ),
    "interleaved": lambda path=None: plot_schedule(
        schedules.interleaved(6, 5, num_devices=2), path=path
    ),
    "timelines": lambda path=None: plot_timelines(theory_and_measurement(), path=path),
    "memory": lambda path=None: plot_memory(
        simulate(
            schedules.gpipe(3, 4), Costs(kept_bytes=1e6, fixed_bytes=(1e6, 2e6, 3e6))
        ),
        path=path,
    ),
    "in flight": lambda path=None: plot_memory(
        simulate(schedules.one_f_one_b(3, 4), MILLISECONDS), path=path
    ),
    "mesh": lambda path=None: plot_mesh(MESH, path=path),
    "bubbles": lambda path=None: plot_bubbles(
        3, num_microbatches=(3, 6, 12), path=path
    ),
    "gpipe bubbles": lambda path=None: plot_gpipe_bubbles(
        (2, 4), measured=measured_bubbles(), path=path
    ),
    "peaks": lambda path=None: plot_peaks(PEAKS, path=path),
    "differences": lambda path=None: plot_differences(
        DIFFERENCES, tolerance=1e-12, path=path
    ),
}

# Seconds to render.
LARGE = {
    "1f1b, large": lambda path=None: plot_schedule(
        schedules.one_f_one_b(8, 32), path=path
    ),
    "zero_bubble, large": lambda path=None: plot_schedule(
        schedules.find("zero_bubble")(4, 32), path=path
    ),
    "many devices": lambda path=None: plot_schedule(schedules.gpipe(12, 1), path=path),
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A picture, made and rendered once.

    Attributes:
        figure: The picture.
        path: The file that it was written to.
        texts: All text that shows, with its place in pixels.
    """

    figure: Figure
    path: Path
    texts: list[tuple[str, Bbox]]

    @property
    def words(self):
        return [text for text, _ in self.texts]

    @property
    def axes(self):
        return self.figure.axes

    @property
    def legend(self):
        return self.figure.legends[0]


def render(name, draw, folder):
    path = folder / f"{name}.png"
    figure = draw(path)
    return Drawn(figure, path, texts(figure))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Every picture but the large ones."""
    folder = tmp_path_factory.mktemp("pictures")
    return {name: render(name, draw, folder) for name, draw in DRAWN.items()}


def texts(figure):
    """Returns all text that shows, with its place in pixels."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    unseen = {id(text) for axes in figure.axes for text in beyond(axes)}
    return [
        (text.get_text(), text.get_window_extent(renderer))
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and id(text) not in unseen
    ]


def beyond(axes):
    """Yields the labels of ticks beyond the ends of an axis, which are not drawn."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks():
            if not low <= tick.get_loc() <= high:
                yield tick.label1


def numbers(axes):
    """Returns the microbatch numbers in the boxes of a timeline."""
    return [t for t in axes.texts if t.get_text().isdigit() and t.get_visible()]


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_written_and_its_text_can_be_read(name, drawn):
    assert_written_and_readable(drawn[name])


def assert_written_and_readable(picture):
    assert isinstance(picture.figure, Figure)
    assert picture.path.read_bytes().startswith(b"\x89PNG")
    assert picture.path.stat().st_size > 5000
    width, height = picture.figure.get_size_inches() * picture.figure.dpi
    outside = [
        text
        for text, box in picture.texts
        if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height
    ]
    assert not outside
    edges = np.array([box.extents for _, box in picture.texts])  # x0, y0, x1, y1
    low, high = edges[:, None, :2], edges[:, None, 2:]
    common = np.minimum(high, high.swapaxes(0, 1)) - np.maximum(low, low.swapaxes(0, 1))
    overlapping = np.argwhere(np.triu((common > 0).all(axis=-1), k=1))
    assert not [(picture.words[a], picture.words[b]) for a, b in overlapping]


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "timelines"])
def test_numbers_lie_inside_their_boxes(name, drawn):
    assert_numbers_are_inside(drawn[name])


def assert_numbers_are_inside(picture):
    for axes in picture.axes:
        boxes = [
            path.get_extents(collection.get_transform())
            for collection in axes.collections
            for path in collection.get_paths()
        ]
        found = numbers(axes)
        assert found
        for text in found:
            extent = text.get_window_extent()
            assert any(
                box.x0 <= extent.x0 and extent.x1 <= box.x1 and box.width < 200
                for box in boxes
                if box.y0 <= extent.y0 and extent.y1 <= box.y1
            ), text


@pytest.mark.nightly
@pytest.mark.parametrize("name", LARGE)
def test_a_large_picture_can_be_read(name, tmp_path):
    picture = render(name, LARGE[name], tmp_path)
    assert_written_and_readable(picture)
    if name == "1f1b, large":
        assert_numbers_are_inside(picture)


@pytest.mark.parametrize("name", schedules.NAMES)
def test_every_action_of_a_small_schedule_is_numbered(name):
    plan = schedules.make(name, num_stages=4, num_microbatches=8)
    (axes,) = plot_schedule(plan).axes
    actions = sorted(a.microbatch for order in plan.orders for a in order)
    assert sorted(int(t.get_text()) for t in numbers(axes)) == actions


def test_a_number_without_room_is_left_out():
    costs = Costs(forward=0.01, backward=2)
    (axes,) = plot_schedule(schedules.gpipe(2, 30), costs=costs).axes
    shown = [int(t.get_text()) for t in numbers(axes)]
    assert len(shown) == 2 * 30  # Those of the backwards.


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gpipe", ["forward", "backward", "idle"]),
        ("interleaved", ["forward", "backward", "idle"]),
        ("timelines", ["forward", "recompute", "backward", "idle"]),
        (
            "zero_bubble",
            [
                "forward",
                "recompute",
                "input gradient",
                "weight gradient",
                "idle",
            ],
        ),
        ("memory", ["activations", "weights, gradients, slots"]),
        ("in flight", ["microbatches in flight"]),
        (
            "bubbles",
            ["gpipe", "1f1b", "interleaved, 2 stages a device", "zero_bubble"],
        ),
        ("gpipe bubbles", ["K = 2", "K = 4"]),
        ("peaks", ["kept", "recomputed"]),
        ("differences", ["K=2, M=4", "K=4, M=8"]),
    ],
)
def test_the_legend_names_all_there_is(name, kinds, drawn):
    assert [text.get_text() for text in drawn[name].legend.get_texts()] == kinds


def test_the_legend_lies_outside_the_axes(drawn):
    for picture in [each for each in drawn.values() if each.figure.legends]:
        box = picture.legend.get_window_extent()
        assert not any(box.overlaps(axes.get_window_extent()) for axes in picture.axes)


def test_stages_of_a_device_have_a_shade_each(drawn):
    picture = drawn["interleaved"]
    title = picture.legend.get_title().get_text()
    assert title == "dark to light: first to last stage of a device"
    colours = {
        tuple(collection.get_facecolor()[0])
        for collection in picture.axes[0].collections
        if collection.get_hatch() is None
    }
    assert len(colours) == 2 * 3
    assert not drawn["gpipe"].legend.get_title().get_text()


def test_idle_time_is_hatched(drawn):
    hatched = [c for c in drawn["gpipe"].axes[0].collections if c.get_hatch()]
    assert len(hatched) == 4


def test_devices_go_down_and_time_across(drawn):
    (axes,) = drawn["gpipe"].axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"device {p}" for p in range(4)]
    bottom, top = axes.get_ylim()
    assert bottom > top
    assert axes.get_xlim() == (0, 33)
    assert axes.get_xlabel() == "time in forwards"


def test_forwards_of_two_encoders_are_drawn_at_once():
    flow = schedules.DataFlow(((), (), (0, 1)))
    figure = plot_schedule(schedules.gpipe(3, 2, flow=flow))
    texts = [(x.get_text(), x.get_position()) for x in figure.axes[0].texts]
    (first, second), (third,) = (
        [at for text, at in texts if text == "0" and at[1] in rows][: len(rows)]
        for rows in ((0, 1), (2,))
    )
    assert first[0] == second[0] < third[0]


def test_a_schedule_prints_its_numbers(drawn):
    shown = drawn["gpipe"].words
    assert "gpipe, 4 stages on 4 devices, 8 microbatches" in shown
    numbers = "step time 33 forwards, bubble 27.3%, efficiency 72.7%, imbalance 1.00"
    assert numbers in shown
    assert shown.count("72.7%") == 4
    assert "utilisation" in shown


def test_given_costs_are_drawn_in_milliseconds(drawn):
    (axes,) = drawn["zero_bubble"].axes
    assert axes.get_xlabel() == "time in ms"
    assert axes.get_xlim() == (0, pytest.approx(38))


def test_theory_and_measurement_share_one_axis(drawn):
    timelines = theory_and_measurement()
    upper, lower = drawn["timelines"].axes
    assert upper.get_xlim() == lower.get_xlim()
    assert lower.get_xlim()[1] == pytest.approx(1e3 * timelines[1].step_time)
    assert upper.get_position().x0 == lower.get_position().x0
    assert upper.get_position().y0 > lower.get_position().y1
    for axes, timeline in zip((upper, lower), timelines, strict=True):
        shown = [text.get_text() for text in axes.texts]
        assert timeline.title in shown
        assert any(f"bubble {timeline.bubble:.1%}" in text for text in shown)
        assert {f"{share:.1%}" for share in timeline.utilisation} <= set(shown)


def test_long_steps_are_drawn_in_seconds():
    timeline = simulate(schedules.gpipe(2, 4), Costs(forward=5, backward=5)).timeline
    (axes,) = plot_timelines([timeline]).axes
    assert axes.get_xlabel() == "time in s"
    assert axes.get_xlim() == (0, 50)


def test_memory_is_drawn_with_its_peaks(drawn):
    figure = drawn["memory"]
    assert len(figure.axes) == 3
    shown = figure.words
    assert {"4.8 MiB", "5.7 MiB", "6.7 MiB"} <= set(shown)
    (line,) = figure.axes[2].get_lines()
    assert max(line.get_ydata()) == 7e6
    # The line goes on to the end of the step, when only weights are left.
    assert line.get_xdata()[-1] == figure.axes[0].get_xlim()[1]
    assert line.get_ydata()[-1] == 3e6


def test_without_bytes_microbatches_in_flight_are_drawn(drawn):
    peaks = [max(axes.get_lines()[0].get_ydata()) for axes in drawn["in flight"].axes]
    assert peaks == [3, 2, 1]
    assert "1f1b, simulated: microbatches in flight" in drawn["in flight"].words


def test_bubbles_are_those_of_the_closed_forms(drawn):
    (axes,) = drawn["bubbles"].axes
    curves = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    Ms, P = (3, 6, 12), 3
    flushed = [100 * (P - 1) / (M + P - 1) for M in Ms]
    assert curves["gpipe"] == pytest.approx(flushed)
    assert curves["1f1b"] == pytest.approx(flushed)
    assert curves["interleaved, 2 stages a device"] == pytest.approx(
        [100 * (P - 1) / (2 * M + P - 1) for M in Ms]
    )
    assert curves["zero_bubble"] == pytest.approx(
        [100 * (P - 1) / (3 * M + P - 1) for M in Ms]
    )


def test_bubbles_start_where_every_schedule_can():
    (axes,) = plot_bubbles(2).axes
    assert list(axes.get_lines()[0].get_xdata()) == [2, 4, 8, 16, 32]
    with pytest.raises(ValueError, match="needs at least as many microbatches"):
        plot_bubbles(4, num_microbatches=(2, 4))


def test_measured_bubbles_lie_beside_the_formulas(drawn):
    (axes,) = drawn["gpipe bubbles"].axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    Ms = (1, 2, 4, 8, 16, 32, 64)
    for K in (2, 4):
        expected = [100 * (K - 1) / (M + K - 1) for M in Ms]
        assert lines[f"K = {K}"].get_ydata() == pytest.approx(expected)
    dots = [line for line in axes.get_lines() if line.get_marker() == "o"]
    points = [point for line in dots for point in line.get_xydata().tolist()]
    assert points == [
        pytest.approx([step.schedule.num_microbatches, 100 * step.bubble])
        for step in measured_bubbles()
    ]
    assert any("dots: measured" in text for text in drawn["gpipe bubbles"].words)


def test_a_measured_bubble_has_a_curve():
    with pytest.raises(
        ValueError, match=r"Received steps of K=4, and num_stages=\(2,\)"
    ):
        plot_gpipe_bubbles((2,), measured=measured_bubbles())


def test_peaks_are_written_on_their_bars(drawn):
    (axes,) = drawn["peaks"].axes
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == pytest.approx([90, 85.5, 12, 3 / 2**10])
    shown = drawn["peaks"].words
    assert {"90.0\nMiB", "85.5\nMiB", "12.0\nMiB", "3.0\nKiB"} <= set(shown)
    assert {"stage 0", "stage 1"} <= set(shown)


@pytest.mark.parametrize("peaks", [{}, {"a": {}}, {"a": {"x": 1}, "b": {"y": 1}}])
def test_bars_side_by_side_have_the_same_names(peaks):
    with pytest.raises(ValueError, match=r"the same names\. Received .* Give each"):
        plot_peaks(peaks)


def test_each_difference_is_drawn_and_the_largest_told(drawn):
    (axes,) = drawn["differences"].axes
    tolerance, *dots = axes.get_lines()
    assert list(tolerance.get_xdata()) == [1e-12, 1e-12]
    drawn_values = {line.get_label(): list(line.get_xdata()) for line in dots}
    assert drawn_values == {way: [*d.values()] for way, d in DIFFERENCES.items()}
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"dense_{i}/kernel" for i in range(4)]
    told = "largest 1.0e-14; dashed: the tolerance, 1e-12"
    assert told in drawn["differences"].words


def test_equal_numbers_have_a_picture_too():
    (axes,) = plot_differences({"all": {"w": 0.0}}, tolerance=1e-6).axes
    assert axes.get_xlim()[0] < 0 < 1e-6 < axes.get_xlim()[1]


def test_no_differences_make_no_picture():
    with pytest.raises(ValueError, match=r"at least one difference\. Received none"):
        plot_differences({"all": {}}, tolerance=1e-6)


def test_matplotlib_is_loaded_on_use_and_pyplot_never(tmp_path):
    path = tmp_path / "picture.svg"
    code = (
        "import sys\n"
        "from tfgpipe import schedules\nfrom tfgpipe.report import plots\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"plots.plot_schedule(schedules.gpipe(2, 2), path={str(path)!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    run = interpret(code)
    assert run.returncode == 0, run.stderr
    assert "<svg" in path.read_text()


def test_no_timelines_make_no_picture():
    with pytest.raises(
        ValueError, match=r"at least one timeline\. Received none\. Give"
    ):
        plot_timelines([])


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="Run `pip install matplotlib`, or print the"):
        plot_schedule(schedules.gpipe(2, 2))
