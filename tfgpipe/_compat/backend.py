"""Checks that TensorFlow is there and Keras runs on it, before either is imported."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import sys


def check_tensorflow() -> None:
    """Raises ImportError, with what to install, where TensorFlow is missing.

    Looks for it without importing it, which takes seconds. After `pip uninstall` of one
    of two distributions a folder without code may be left, which is none.
    """
    if sys.modules.get("tensorflow"):
        return
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        raise ImportError(
            "tfgpipe needs TensorFlow, which is not installed in this environment. "
            "Try `pip install 'tensorflow>=2.20,<2.22'`; on a TPU VM "
            "`pip install 'tensorflow-tpu>=2.20,<2.22'`."
        )


def check_keras_backend() -> None:
    """Raises ImportError if Keras is set to run on something other than TensorFlow.

    Looks at where Keras itself looks, without importing it: a Keras that is loaded
    already, the variable KERAS_BACKEND, the file `keras.json`.
    """
    keras = sys.modules.get("keras")
    if keras is not None and "config" in vars(keras):
        backend, source = keras.config.backend(), "Keras was imported with"
    elif os.environ.get("KERAS_BACKEND"):
        backend, source = os.environ["KERAS_BACKEND"], "KERAS_BACKEND is"
    else:
        backend, source = _configured_backend(), "keras.json names"
    if backend != "tensorflow":
        raise ImportError(
            f"tfgpipe needs Keras to run on TensorFlow, but {source} {backend!r}. Set "
            "KERAS_BACKEND=tensorflow in the environment before Python starts."
        )


def _configured_backend() -> str:
    home = os.environ.get("KERAS_HOME") or pathlib.Path.home() / ".keras"
    try:
        config = json.loads((pathlib.Path(home) / "keras.json").read_text())
    except (OSError, ValueError):
        return "tensorflow"
    return str(config.get("backend", "tensorflow"))
