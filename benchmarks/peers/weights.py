"""Writes what all sides start from: Keras' initial weights, and the data.

Runs in the environment of this library, in a process of its own, so that the one that
only tells others when to train need not import TensorFlow.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers import protocol

if TYPE_CHECKING:
    import keras


def dump(path: Path, workload: str, sizes: Mapping[str, float]) -> None:
    """Writes the initial weights and the data of a workload for peers to read.

    Args:
        path: Where to.
        workload: A name in `benchmarks.workloads.WORKLOADS`.
        sizes: Keyword arguments of the workload.
    """
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_dump, args=(path, workload, dict(sizes)))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError("The weights were not written. What was said is above.")


def _dump(path: Path, workload: str, sizes: dict[str, float]) -> None:
    from benchmarks import workloads

    made = workloads.WORKLOADS[workload](**sizes)
    layers = made.make_layers()
    made.make_model(layers)
    workloads.set_weights(layers)
    x, y = made.make_data()
    given = protocol.Given(
        x=x,
        y=y,
        layers=[describe(layer) for layer in layers],
        layers_per_stage=made.layers_per_stage,
    )
    protocol.write(path, given)


def describe(layer: keras.Layer) -> protocol.Layer:
    """Returns a built Keras layer as other libraries read it."""
    prefix = f"{layer.path}/"
    return protocol.Layer(
        kind=type(layer).__name__,
        config=layer.get_config(),
        weights={
            weight.path.removeprefix(prefix).replace("/", "."): weight.numpy()
            for weight in layer.trainable_weights
        },
    )
