"""The line that tells how far slow work is."""

from __future__ import annotations

import io

import keras
import numpy as np
import pytest

import tfgpipe
from tfgpipe.stage import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def told(
    stream: io.StringIO, *seconds: float, number: int = 1
) -> progress.ProgressLine:
    """Returns progress on the first of three, asked at these times."""
    clock = Clock()
    made = progress.ProgressLine(
        "tracing stage", "traced 3 stages", 3, clock=clock, stream=stream
    )
    made.begin(number)
    for second in seconds:
        clock.now = 100.0 + second
        made.tick()
    return made


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_short_work_is_silent(kind):
    stream = kind()
    told(stream, 0.5, 1.0, 1.9).end()
    assert not stream.getvalue()


def test_a_terminal_shows_one_line_that_is_rewritten_every_second():
    stream = Terminal()
    made = told(stream, 1.0, 2.0, 2.5, 3.0, 4.1)
    made.begin(2)
    made.end("; more follows")
    assert stream.getvalue() == (
        "\rtfgpipe: tracing stage 1 of 3 (2 s)\x1b[K"
        "\rtfgpipe: tracing stage 1 of 3 (3 s)\x1b[K"
        "\rtfgpipe: tracing stage 1 of 3 (4 s)\x1b[K"
        "\rtfgpipe: traced 3 stages in 4 s; more follows\x1b[K\n"
    )


def test_a_file_gets_a_line_every_ten_seconds():
    stream = io.StringIO()
    told(stream, *range(1, 25), number=2).end()
    assert stream.getvalue().splitlines() == [
        "tfgpipe: tracing stage 2 of 3 (2 s)",
        "tfgpipe: tracing stage 2 of 3 (12 s)",
        "tfgpipe: tracing stage 2 of 3 (22 s)",
        "tfgpipe: traced 3 stages in 24 s",
    ]


def test_nothing_is_told_before_any_work_begins():
    stream = Terminal()
    made = progress.ProgressLine("tracing stage", "traced", 3, stream=stream)
    made.tick()
    made.end()
    assert not stream.getvalue()


def train(monkeypatch, capsys) -> str:
    """Trains a pipeline as if each stage took long to trace."""
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    begin = progress.ProgressLine.begin

    def slow(self, number):
        begin(self, number)
        self.tick()

    monkeypatch.setattr(progress.ProgressLine, "begin", slow)
    stack = [keras.layers.Dense(3), keras.layers.Dense(4, activation="relu")]
    layer = tfgpipe.PipelinedLayer(stack, num_stages=2, num_microbatches=2)
    x = np.ones((4, 3), "float32")
    layer(x)
    first = capsys.readouterr().err
    layer(x)  # Traced before.
    assert not capsys.readouterr().err
    return first


def test_stages_that_are_traced_are_told_once(monkeypatch, capsys):
    lines = train(monkeypatch, capsys).splitlines()
    assert lines[0] == "tfgpipe: tracing stage 1 of 2 (0 s)"
    assert lines[-1].startswith("tfgpipe: traced 2 stages in ")


def test_where_keras_logs_nothing_is_told(monkeypatch, capsys):
    keras.config.disable_interactive_logging()
    try:
        assert not train(monkeypatch, capsys)
    finally:
        keras.config.enable_interactive_logging()
