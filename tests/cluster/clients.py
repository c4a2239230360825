"""A client of one of two replicas, each a pipeline on two of four workers.

python -m tests.cluster.clients LIST REPLICA [HOW]

HOW: "trains" and prints what it has learnt, "trains on" without end, with "other
     weights", or, if it is the first, "trains less" than the other; the second "trains
     late", once the first waits for it, or "never"
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np

import tfgpipe
from tfgpipe import cluster
from tfgpipe.cluster import peers
from tfgpipe.distribution.process_group import ProcessGroup

NUM_REPLICAS, NUM_STAGES, EPOCHS = 2, 2, 3
# Rows of a batch on each replica: three batches of one fit, and one of another.
_SIZES = ((8, 8), (7, 6))
# Is there once the first waits for the second.
_FIRST_WAITS = Path(os.environ.get("FIRST_WAITS", "first waits"))


def trained(replica: int | None, how: str = "trains") -> dict[str, Any]:
    """Returns losses, weights and devices of a replica, or None for all in one process.

    Args:
        replica: The replica, of which this process is the client.
        how: See above.
    """
    if replica is None:
        strategy = tfgpipe.PipelineStrategy(
            num_stages=NUM_STAGES, num_replicas=NUM_REPLICAS
        )
    else:
        strategy = tfgpipe.PipelineStrategy(num_stages=NUM_STAGES)
    keras.utils.set_random_seed(replica or 0 if how == "other weights" else 0)
    with strategy.scope():
        layers = [
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1, kernel_regularizer="l2"),
        ]
        model = tfgpipe.PipelinedModel(
            layers, num_microbatches=2, schedule="1f1b", partition=[2, 2]
        )
        model.build((None, 8))
        adam = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
        rmse = keras.metrics.RootMeanSquaredError(name="rmse")
        model.compile(adam, "mse", metrics=["mae", rmse])
    if how in ("trains late", "never") and replica:
        while not (how == "trains late" and _FIRST_WAITS.exists()):
            time.sleep(0.1)
        time.sleep(2)
    found: dict[str, Any] = {}
    epochs = {"trains on": 10**9, "trains less": 1 + (replica or 0)}.get(how, EPOCHS)
    for sizes, batches, name in zip(_SIZES, (3, 1), ("even", "uneven"), strict=True):
        size = sum(sizes)
        x = np.random.RandomState(batches).randn(batches, size, 8).astype("float32")
        if replica is not None:
            x = np.split(x, [sizes[0]], axis=1)[replica]
            size = sizes[replica]
        x = x.reshape(-1, 8)
        fitted = model.fit(
            x,
            y := x.sum(1, keepdims=True),
            batch_size=size,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[_Tells()],
        )
        found[name] = fitted.history
        if how == "trains less":
            return found
        found[f"{name} evaluated"] = model.evaluate(x, y, batch_size=size, verbose=0)
    values = [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]
    found["values"] = [np.ravel(value).tolist() for value in values]
    found["devices"] = [v.value.device for v in model.trainable_variables]
    return found


class _Tells(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        print("trained", epoch, flush=True)


def main(workers: str, replica: str, how: str = "trains") -> None:
    """Trains, and prints what comes of it as JSON."""
    if how == "trains less":
        peers.SILENCE_SECONDS = 3.0
    if how == "trains late" and replica == "0":
        check = ProcessGroup.check_weights

        def tell(*arguments: Any) -> None:
            _FIRST_WAITS.touch()
            check(*arguments)

        mock.patch.object(ProcessGroup, "check_weights", tell).start()
    with cluster.report_exit():
        cluster.connect(
            workers,
            replica=int(replica),
            num_replicas=NUM_REPLICAS,
            step_seconds=20.0 if how == "never" else 1800.0,
        )
        print("found " + json.dumps(trained(int(replica), how)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
