"""A client in a process of its own: trains on workers as on its own devices.

python -m tests.cluster.client LIST CASE [CASE...]
"""

from __future__ import annotations

import contextlib
import os
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tfgpipe import cluster
from tfgpipe.distribution import optimizer_slots as slots_of

# Stages of `main`'s layers.
_CROSSED = ("0/CPU:0", "0/CPU:1", "1/CPU:1", "1/CPU:0")
CUTS = {2: [2, 3], 3: [2, 2, 1]}


def listed(addresses):
    """Returns addresses as a command line gives them."""
    return ",".join(map(str, addresses))


def train(K, *, strategy=None, devices=None):
    """Returns all that comes of training: losses, weights, slots, predictions."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        layers = [
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
        model = tfgpipe.PipelinedModel(
            layers,
            num_stages=None if strategy else K,
            num_microbatches=4,
            schedule="1f1b",
            remat="stage",
            balance=CUTS[K],
            devices=devices,
        )
        model.compile("adam", "mse", metrics=["mae"])
        x = np.random.RandomState(0).randn(48, 8).astype("float32")
        y = x.sum(1, keepdims=True)
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        found = [*history.history["loss"], *history.history["mae"]]
        found += model.evaluate(x, y, verbose=0)
        found += [*model.get_weights(), model.predict(x, verbose=0)]
        found += [variable.numpy() for variable in model.optimizer.variables]
    return model, found


def check_equal(K, *, strategy=None):
    """Checks that workers give what this process' own devices give, bit for bit."""
    local = [f"CPU:{k}" for k in range(4)]
    if strategy is None:
        _, expected = train(K, devices=local[:K])
    else:
        D = strategy.num_replicas_in_sync
        here = tfgpipe.PipelineStrategy(num_stages=K, num_replicas=D, devices=local)
        _, expected = train(K, strategy=here)
    model, found = train(K, strategy=strategy)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)
    for stage in model.stages:
        device = model.mesh.replica_devices(stage.index)[0]
        assert device.startswith("/job:worker/")
        optimizer = model.optimizer
        for weight in (v for layer in stage.layers for v in layer.trainable_variables):
            slots = slots_of(optimizer, [weight])
            assert len(slots) == 2
            for each in (weight, *slots):
                assert each.value.device == device


def raised(kind, message, make):
    """Checks that something is refused in words."""
    with pytest.raises(kind, match=re.escape(message)):
        make()


def main(workers, *cases):
    """Runs cases, one after the other."""
    tfgpipe.make_logical_cpus(4)
    seconds = float(os.environ.get("TFGPIPE_SECONDS", "120"))
    cluster.connect(workers, seconds=seconds)
    for case in cases:
        if case == "plain":
            check_equal(len(workers.split(",")))
        elif case == "replicas":
            check_equal(
                2,
                strategy=tfgpipe.PipelineStrategy(
                    num_stages=2, num_replicas=2, cluster=workers
                ),
            )
        elif case == "refused":
            raised(
                ValueError,
                "Received worker:0/CPU:1, worker:1/CPU:0. Name `devices` whose last",
                lambda: tfgpipe.PipelineStrategy(
                    num_stages=2,
                    num_replicas=2,
                    devices=[f"/job:worker/task:{n}" for n in _CROSSED],
                ),
            )
            raised(
                ValueError,
                "2 stages x 3 replicas x 1 shards over 2 workers need 3 devices on "
                "each. Received 2 on worker:0. Start the workers with --devices=3",
                lambda: tfgpipe.PipelineStrategy(
                    num_stages=2, num_replicas=3, cluster=workers.split(",")
                ),
            )
            raised(
                RuntimeError,
                "A process has one cluster. Received 127.0.0.1:4000 when it was",
                lambda: cluster.connect("127.0.0.1:4000"),
            )
        elif case == "waits":
            # Until it is killed, or a worker of its is.
            print("waiting", flush=True)
            with cluster.connect(workers).raise_if_lost():
                while True:
                    with tf.device("/job:worker/task:0/CPU:0"):
                        tf.random.normal([3]).numpy()
        print(f"{case}: passed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
