"""The check that Keras runs on TensorFlow looks where Keras looks."""

from __future__ import annotations

import sys
import types

import pytest

from tests.helpers.subprocesses import interpret
from tfgpipe._compat import backend


@pytest.fixture
def keras_home(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("text", [None, "", "{}", '{"backend": "tensorflow"}'])
def test_tensorflow_is_the_default(keras_home, text):
    if text is not None:
        (keras_home / "keras.json").write_text(text)
    backend.check_keras_backend()


def test_a_loaded_keras_comes_before_the_variable_and_that_before_the_file(
    keras_home, monkeypatch
):
    (keras_home / "keras.json").write_text('{"backend": "torch"}')
    with pytest.raises(ImportError, match=r"keras\.json names 'torch'"):
        backend.check_keras_backend()
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(ImportError, match="KERAS_BACKEND is 'jax'"):
        backend.check_keras_backend()
    keras = types.ModuleType("keras")
    keras.config = types.SimpleNamespace(backend=lambda: "numpy")
    monkeypatch.setitem(sys.modules, "keras", keras)
    with pytest.raises(ImportError, match="imported with 'numpy'"):
        backend.check_keras_backend()
    keras.config = types.SimpleNamespace(backend=lambda: "tensorflow")
    backend.check_keras_backend()


@pytest.mark.parametrize(("variable", "expected"), [("", "numpy"), ("jax", "jax")])
def test_keras_looks_there(tmp_path, variable, expected):
    """In a process of its own; a backend that is not installed is in the error."""
    (tmp_path / "keras.json").write_text('{"backend": "numpy"}')
    code = "import keras; print(keras.config.backend())"
    run = interpret(code, KERAS_BACKEND=variable, KERAS_HOME=str(tmp_path))
    assert expected in run.stdout + run.stderr
