"""A replica in a process of its own, or all of them in one: tells what it has learnt.

python -m tests.cluster.replica LIST INDEX [EPOCHS] [HOW] [HOST...]

LIST: of addresses, or empty for all replicas in one process
HOW: "synchronized" has a batch normalization over all replicas, and the second process
     trace its train step again after the first epoch; "" has neither
HOST: an address of this host, at which it tries to reach its own port
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tfgpipe.distribution import optimizer_slots as slots_of


def main(
    workers: str, index: str, epochs: str = "3", how: str = "", *hosts: str
) -> None:
    """Trains, and prints losses, weights and devices as JSON."""
    tfgpipe.make_logical_cpus(6)
    found = trained(workers, index, epochs, how, hosts)
    print("found " + json.dumps(found), flush=True)


def trained(
    workers: str, index: str, epochs: str, how: str, hosts: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns losses, weights, devices, and the hosts at which it is reached."""
    scope, reached = contextlib.nullcontext(), []
    if how and not workers:
        scope = tfgpipe.PipelineStrategy(num_stages=3, num_replicas=2).scope()
    if workers:
        os.environ["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": workers.split(",")},
                "task": {"type": "worker", "index": int(index)},
            }
        )
        scope = tfgpipe.MultiWorkerPipelineStrategy(num_stages=3).scope()
        reached = _reached(workers.split(",")[int(index)], hosts)
    keras.utils.set_random_seed(0)
    with scope:
        layers = [
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(synchronized=True)
            if how
            else keras.layers.LayerNormalization(),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(1),
        ]
        model = tfgpipe.PipelinedModel(
            layers,
            num_stages=None if workers or how else 3,
            num_microbatches=3,
            schedule="1f1b",
            partition=[2, 1, 1],
        )
        model.build((None, 8))
        adam = keras.optimizers.Adam(0.01)
        metrics = [keras.metrics.RootMeanSquaredError(name="rmse")]
        metrics += ["mae", keras.metrics.R2Score(name="r2")]
        model.compile(adam, "mse", metrics=metrics)
    x = np.random.RandomState(0).randn(48, 8).astype("float32")
    y = x.sum(1, keepdims=True)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12, drop_remainder=True)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    data = data.with_options(options)

    def trained_epoch(epoch: int, logs: object) -> None:
        print("trained", epoch, flush=True)
        if how and index == "1" and epoch == 0:
            model.make_train_function(force=True)

    steps: list[float] = []
    trained = keras.callbacks.LambdaCallback(
        on_epoch_end=trained_epoch,
        on_train_batch_end=lambda _, logs: steps.extend(map(float, logs.values())),
    )
    history = model.fit(
        data, epochs=int(epochs), shuffle=False, verbose=0, callbacks=[trained]
    ).history
    rows = data.unbatch().batch(12)
    if workers:
        # Eight examples of each batch in the first process, four in the second.
        own = slice(0, 8) if index == "0" else slice(8, 12)
        parts = rows.map(lambda x, y: (x[own], y[own]))
        rows = model.distribute_strategy.distribute_datasets_from_function(
            lambda _: parts
        )
    evaluated = model.evaluate(rows, verbose=0)
    weights = [float(np.abs(weight).sum()) for weight in model.get_weights()]
    devices = [
        [v.value.device for v in model.variables],
        [v.value.device for v in slots_of(adam, model.variables)],
    ]
    found = {**history, "steps": steps, "evaluated": evaluated, "weights": weights}
    return {**found, "devices": devices, "reached": reached}


def _reached(address: str, hosts: tuple[str, ...]) -> list[str]:
    """Returns those of some addresses of this host at which the port is open."""
    port, reached = int(address.partition(":")[2]), []
    for host in hosts:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((host, port), timeout=5).close()
            reached.append(host)
    return reached


if __name__ == "__main__":
    main(*sys.argv[1:])
