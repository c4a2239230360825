"""Shared set-up: TensorFlow starts, on eight logical CPUs, for the tests that use it.

Those in `tests/pure` do without, and start in a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

PURE = Path(__file__).resolve().parent / "pure"

# How long an example takes says nothing on a machine that is busy.
hypothesis.settings.register_profile("tfgpipe", deadline=None)
hypothesis.settings.load_profile("tfgpipe")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Starts TensorFlow before a file that may use it is imported."""
    if isinstance(collector, pytest.Module) and PURE not in collector.path.parents:
        _start_tensorflow()


def _start_tensorflow() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras  # noqa: F401

    import tfgpipe

    tfgpipe.make_logical_cpus(8)


@pytest.fixture(autouse=True)
def fresh_names_and_seeds() -> None:
    """Layer names and random draws do not depend on which tests ran before."""
    if "keras" in sys.modules:
        import keras

        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)


@pytest.fixture
def floatx() -> Iterator[Callable[[str], None]]:
    """Sets the dtype of everything that is made in a test."""
    import keras

    yield keras.config.set_floatx
    keras.config.set_floatx("float32")
    # Keras keeps the policy that it made of the other dtype.
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Computes in double precision, losses as well."""
    import keras

    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


@pytest.fixture
def mixed_precision() -> Iterator[None]:
    """Computes in half precision, and keeps weights in single."""
    import keras

    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")
