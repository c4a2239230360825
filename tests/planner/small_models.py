"""Models that command lines name."""

from __future__ import annotations

import keras


def dense() -> keras.Model:
    """Returns four layers of eight units."""
    layers = [keras.layers.Dense(8) for _ in range(4)]
    return keras.Sequential([keras.Input((8,)), *layers])
