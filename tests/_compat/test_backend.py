"""TensorFlow is looked for, and the backend of Keras where Keras looks."""

from __future__ import annotations

import sys
import types

import pytest

from tests.helpers.subprocesses import interpret
from tfgpipe._compat import backend

pytestmark = pytest.mark.pure


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
def test_keras_reads_the_variable_before_the_file(tmp_path, variable, expected):
    """In a process of its own; a backend that is not installed is in the error."""
    (tmp_path / "keras.json").write_text('{"backend": "numpy"}')
    code = "import keras; print(keras.config.backend())"
    run = interpret(code, KERAS_BACKEND=variable, KERAS_HOME=str(tmp_path))
    assert expected in run.stdout + run.stderr


def test_a_missing_tensorflow_is_an_import_error(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(ImportError, match="pip install 'tensorflow>="):
        backend.check_tensorflow()
    # What `pip uninstall` may leave.
    (tmp_path / "tensorflow" / "include").mkdir(parents=True)
    with pytest.raises(ImportError, match="not installed"):
        backend.check_tensorflow()


def test_a_tensorflow_is_found_and_not_imported(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    backend.check_tensorflow()


def test_a_loaded_tensorflow_is_there_wherever_it_came_from(monkeypatch):
    # Without a spec, as modules have that a program makes itself.
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    backend.check_tensorflow()
