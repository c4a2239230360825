"""Two hosts and the supervisor: a process is killed, and the training goes on.

    python -m tfgpipe.cluster launch --workers=2 -- python examples/multi_host.py

starts two workers on this machine in place of those on two hosts, each of which has one
stage. It needs no GPU, takes 60 seconds, and ends with:

    stage 0 on worker:0/CPU:0
    stage 1 on worker:1/CPU:0
    epoch 3  loss 0.786
    epoch 4  loss 0.725
    epoch 5  loss 0.678
    the last 3 losses equal those of an undisturbed plain model

On two real hosts run `python -m tfgpipe.cluster worker --port=4000 --host=0.0.0.0`, and
this program with their addresses in TFGPIPE_CLUSTER, again after its kill. Read
docs/how-to/hosts.md first: the ports of workers belong into a private network.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfgpipe

EPOCHS = 6
backup = Path("two_hosts_backup")  # Of the last epoch; deleted after the last one.
killed_before = backup.exists()

# `launch` lists the workers in this variable. The first has stage 0, the second stage 1.
workers = os.environ.get(tfgpipe.cluster.WORKERS_VARIABLE)
if workers is None:
    sys.exit("Start this program with `python -m tfgpipe.cluster launch`, as above.")
strategy = tfgpipe.PipelineStrategy(num_stages=2, cluster=workers)


def make_layers() -> list[keras.layers.Layer]:
    """Returns the layers, with the same weights each time."""
    keras.utils.set_random_seed(0)
    return [keras.layers.Dense(16, activation="tanh") for _ in range(4)]


class KillOnce(keras.callbacks.Callback):
    """Kills this process after the third epoch of its first start."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prints the loss, and dies."""
        print(f"epoch {epoch}  loss {(logs or {})['loss']:.3f}", flush=True)
        if epoch == 2 and not killed_before:
            os.kill(os.getpid(), signal.SIGKILL)


random = np.random.default_rng(0)
x = random.standard_normal((64, 16), dtype="float32")
arguments = {"batch_size": 32, "epochs": EPOCHS, "shuffle": False, "verbose": 0}

with strategy.scope():
    model = tfgpipe.PipelinedModel(make_layers(), num_microbatches=4, schedule="1f1b")
    model.build((None, 16))
    model.compile(keras.optimizers.Adam(1e-2), "mse")
for k in range(2):
    print(f"stage {k} on {strategy.mesh.short_names(k)}")
callbacks = [keras.callbacks.BackupAndRestore(backup), KillOnce()]
received = model.fit(x, x, callbacks=callbacks, **arguments).history["loss"]

plain = keras.Sequential(make_layers())
plain.compile(keras.optimizers.Adam(1e-2), "mse")
expected = plain.fit(x, x, **arguments).history["loss"]
np.testing.assert_allclose(received, expected[-len(received) :], rtol=1e-4)
print(f"the last {len(received)} losses equal those of an undisturbed plain model")
