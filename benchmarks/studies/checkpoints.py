"""Kept in the background, a checkpoint of 1.21 GB costs 1.5 s, and at once 2.95 s.

How long a checkpoint keeps training waiting, at 100 million parameters.

    python -m benchmarks.studies.checkpoints --width=2048 --layers=24 --repeats=3

A stack of dense layers in two stages under Adam: weights and slots are three times the
parameters. Kept in the background and at once, in turns. Columns: seconds that `save`
takes; seconds that the steps made while the files are written take longer than such
steps alone; their sum, which is what the checkpoint costs; seconds until it is on disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import tfgpipe
from benchmarks import tables


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="Where to write; default: a temporary one.")
    arguments = parser.parse_args()
    tfgpipe.make_logical_cpus(2)

    import keras

    from tfgpipe_trainer.checkpoint import store
    from tfgpipe_trainer.checkpoint.checkpoints import Checkpoints
    from tfgpipe_trainer.config import Saving

    width = arguments.width
    model = tfgpipe.PipelinedModel(
        [keras.layers.Dense(width, activation="tanh") for _ in range(arguments.layers)],
        num_stages=2,
        num_microbatches=2,
        schedule="1f1b",
        remat="none",
    )
    model(keras.Input([width]))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    x = np.random.default_rng(0).normal(size=(arguments.rows, width)).astype("float32")

    def step() -> float:
        started = time.perf_counter()
        model.train_on_batch(x, x)
        return time.perf_counter() - started

    step()
    alone = statistics.median(step() for _ in range(10))
    print(
        f"{model.count_params() / 1e6:.1f} million parameters, a step alone "
        f"{1000 * alone:.0f} ms"
    )
    found: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        number = 0
        for _ in range(arguments.repeats):
            for write in ("async", "sync"):
                number += 1
                folder = Path(temporary) / "checkpoints"
                saved = Checkpoints(
                    folder, model, Saving(keep=1, async_save=write == "async")
                )
                started = time.perf_counter()
                saved.save(saved.copy(number, {}))
                blocked = time.perf_counter() - started
                slower = 0.0
                while number not in store.steps(folder):
                    slower += step() - alone
                until = time.perf_counter() - started
                saved.wait()
                found.setdefault(write, []).append((blocked, slower, until))
                size = sum(
                    path.stat().st_size
                    for path in store.path_of(folder, number).iterdir()
                )
    print(f"{size / 1e9:.2f} GB a checkpoint; medians of {arguments.repeats}, seconds")
    rows = []
    for write, times in found.items():
        blocked, slower, until = (
            statistics.median(each) for each in zip(*times, strict=True)
        )
        rows.append(
            {
                "write": write,
                "save": blocked,
                "slower steps": slower,
                "cost": statistics.median(a + b for a, b, _ in times),
                "on disk after": until,
            }
        )
    print(tables.draw(rows))


if __name__ == "__main__":
    main()
