"""Two clients, a replica each, whose pipelines are on servers; servers sum gradients.

python -m tests.cluster.clients server PORTS INDEX
python -m tests.cluster.clients client PORTS INDEX

             stage 0     stage 1
client 0     server 0    server 2
client 1     server 1    server 3

This is what the library does not offer: replicas as processes, each with a pipeline
over hosts. It takes three things of TensorFlow. Each server has the whole list from its
start, and the leader of groups in its configuration; each client connects to all
servers, not just to its own; and no client is in a group itself, as one is under
`MultiWorkerMirroredStrategy`, which only a process that is not connected can be.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfgpipe
from tfgpipe.cluster.addresses import free_ports
from tfgpipe.cluster.server import bind_server
from tfgpipe.devices import ordering_token
from tfgpipe.distribution.process_all_reduce import InstanceKeys

NUM_REPLICAS, NUM_STAGES = 2, 2


def serve(addresses: list[str], index: int) -> None:
    """Serves until it is killed."""
    config = tf.compat.v1.ConfigProto()
    config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    spec = {"worker": addresses}
    with bind_server(int(addresses[index].partition(":")[2]), loopback=True):
        tf.distribute.Server(spec, job_name="worker", task_index=index, config=config)
    sys.stdin.read()


class _Client(tfgpipe.PipelineStrategy):
    """The strategy of one client, which sums over all."""

    def __init__(self, index: int) -> None:
        tasks = [stage * NUM_REPLICAS + index for stage in range(NUM_STAGES)]
        devices = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in tasks]
        super().__init__(num_stages=NUM_STAGES, devices=devices)
        self._keys = InstanceKeys()

    def apply_gradients(self, optimizer: Any, weights: Any, gradients: Any) -> None:
        """Applies an optimizer to means over clients."""
        keys = self._keys.for_weights(optimizer, weights)
        for i, (weight, key) in enumerate(zip(weights, keys, strict=True)):
            device = weight.value.device
            stage = tf.DeviceSpec.from_string(device).task // NUM_REPLICAS
            with tf.device(device):
                gradients[i] = tf.raw_ops.CollectiveReduceV2(
                    input=gradients[i] / NUM_REPLICAS,
                    group_size=NUM_REPLICAS,
                    group_key=1_000_000 + stage,
                    instance_key=key,
                    ordering_token=[ordering_token(f"gradients {stage}")],
                    merge_op="Add",
                    final_op="Id",
                    timeout_seconds=60,
                )
        super().apply_gradients(optimizer, weights, gradients)


def trained(addresses: list[str], index: int | None) -> dict[str, Any]:
    """Returns losses, weights and devices of a client, or of one process without."""
    if index is None:
        scope: Any = contextlib.nullcontext()
    else:
        (port,) = free_ports(1)
        own = {"localhost": [f"127.0.0.1:{port}"]}
        spec = tf.train.ClusterSpec({"worker": addresses, **own})
        with bind_server(port, loopback=True):
            tf.config.experimental_connect_to_cluster(spec, job_name="localhost")
            tf.config.list_logical_devices()  # TensorFlow connects with the first use.
        scope = _Client(index).scope()
    keras.utils.set_random_seed(0)
    with scope:
        layers = [
            keras.layers.Dense(16, activation="relu"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(1),
        ]
        model = tfgpipe.PipelinedModel(
            layers,
            num_stages=NUM_STAGES if index is None else None,
            num_microbatches=2,
            schedule="1f1b",
            balance=[2, 1],
        )
        model.build((None, 8))
        model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.random.RandomState(0).randn(3, NUM_REPLICAS, 8, 8).astype("float32")
    if index is not None:
        x = x[:, index]  # Its part of each of three batches.
    x = x.reshape(-1, 8)
    y = x.sum(1, keepdims=True)
    size = len(x) // 3
    fitted = model.fit(x, y, batch_size=size, epochs=4, shuffle=False, verbose=0)
    return {
        "loss": fitted.history["loss"],
        "weights": [float(np.abs(weight).sum()) for weight in model.get_weights()],
        "devices": sorted({v.value.device for v in model.trainable_variables}),
    }


def main(role: str, ports: str, index: str) -> None:
    """Serves, or trains and prints losses, weights and devices as JSON."""
    addresses = [f"127.0.0.1:{port}" for port in ports.split(",")]
    if role == "server":
        serve(addresses, int(index))
    print("found " + json.dumps(trained(addresses, int(index))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
