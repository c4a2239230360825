"""A check that Keras runs on TensorFlow, made before anything is built on it."""

from __future__ import annotations

import json
import os
import pathlib
import sys


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
