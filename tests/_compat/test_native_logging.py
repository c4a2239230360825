"""TensorFlow's C++ code, silenced while it starts."""

from __future__ import annotations

import os

import pytest

from tfgpipe._compat import native_logging

pytestmark = pytest.mark.pure

LEVEL = "TF_CPP_MIN_LOG_LEVEL"


@pytest.mark.parametrize("level", [None, "2", "3"])
def test_the_stream_is_turned_away_and_the_environment_as_before(
    level, monkeypatch, capfd
):
    monkeypatch.delenv(LEVEL, raising=False)
    if level is not None:
        monkeypatch.setenv(LEVEL, level)
    with native_logging.native_logging_off():
        os.write(2, b"noise")
        assert os.environ[LEVEL] == (level or "2")
    os.write(2, b"heard")
    assert capfd.readouterr().err == "heard"
    assert os.environ.get(LEVEL) == level


def test_last_words_are_heard_meanwhile(capfd):
    with native_logging.native_logging_off():
        os.write(2, b"noise")
        native_logging.restore_stderr()
        os.write(2, b"last words")
    native_logging.restore_stderr()
    assert capfd.readouterr().err == "last words"


@pytest.mark.parametrize("level", ["0", "1"])
def test_who_asks_for_more_hears_it(level, monkeypatch, capfd):
    monkeypatch.setenv(LEVEL, level)
    with native_logging.native_logging_off():
        os.write(2, b"asked for")
    assert capfd.readouterr().err == "asked for"
