"""A model that a command line names, and that command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

ASKED = [
    *("planner", "--model=tests.planner.small_models.dense", "--batch_size=8"),
    *("--device=h100-80g", "--devices=4"),
]


def dense() -> keras.Model:
    """Returns four layers of eight units."""
    import keras

    layers = [keras.layers.Dense(8) for _ in range(4)]
    return keras.Sequential([keras.Input((8,)), *layers])
