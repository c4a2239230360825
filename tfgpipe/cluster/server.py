"""TensorFlow's server for one client, in a process of its own.

What a client leaves on a server, such as its variables, stays there for minutes after
the client is gone. So each client gets a server of its own, and the worker around it
(see `worker`) ends it with the client.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from tfgpipe.cluster import health, lifeline


def main(argv: Sequence[str]) -> int:
    """Serves until standard input closes; writes a line of JSON every second."""
    lifeline.hold()
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--loopback", action="store_true")
    arguments = parser.parse_args(argv[1:])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    from tfgpipe.cluster import listening

    config = tf.compat.v1.ConfigProto(device_count={"CPU": arguments.devices})
    config.gpu_options.allow_growth = True
    with listening.serving(arguments.port, loopback=arguments.loopback):
        tf.distribute.Server(
            # A client says which other workers there are, and which of them this is.
            {"worker": [f"127.0.0.1:{arguments.port}"]},
            job_name="worker",
            task_index=0,
            protocol="grpc",
            config=config,
        )
    gpus = len(tf.config.list_physical_devices("GPU"))
    devices = {"CPU": arguments.devices, **({"GPU": gpus} if gpus else {})}
    while True:
        sys.stdout.write(json.dumps({"devices": devices}) + "\n")
        sys.stdout.flush()
        time.sleep(health.BEAT_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
