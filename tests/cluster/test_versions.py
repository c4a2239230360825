"""The versions that a worker tells are those that it would load."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfgpipe.cluster import health


def test_versions_are_those_of_the_modules() -> None:
    assert health.version("tensorflow") == tf.__version__
    assert health.version("keras") == keras.__version__
