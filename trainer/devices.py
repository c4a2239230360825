"""One device for each stage, arranged before TensorFlow starts."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from params.experiment import Pipelining


def start_tensorflow(pipelining: Pipelining) -> None:
    """Imports TensorFlow with enough devices: accelerators, else parts of the CPU."""
    num_devices = pipelining.num_stages * pipelining.num_replicas
    with _native_logging_off():
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        (cpu,) = tf.config.list_physical_devices("CPU")
    if len(gpus) >= num_devices:
        return
    if gpus:
        print(
            f"{num_devices} devices are needed and {len(gpus)} GPUs are here: "
            "using the CPU."
        )
        tf.config.set_visible_devices([], "GPU")
    logical = tf.config.get_logical_device_configuration(cpu) or []
    if len(logical) < num_devices:
        import tfgpipe

        tfgpipe.make_logical_cpus(num_devices)


def scope(pipelining: Pipelining) -> contextlib.AbstractContextManager[object]:
    """Returns the scope in which to build a model: a strategy's if there are replicas.

    Without replicas a model is placed in the same way outside any strategy.
    """
    if pipelining.num_replicas == 1:
        return contextlib.nullcontext()
    import tfgpipe

    return tfgpipe.PipelineStrategy(
        num_stages=pipelining.num_stages, num_replicas=pipelining.num_replicas
    ).scope()


@contextlib.contextmanager
def _native_logging_off() -> Iterator[None]:
    """Silences TensorFlow's C++ code, unless TF_CPP_MIN_LOG_LEVEL is set.

    That variable comes too late for what TensorFlow 2.21 writes while it is imported,
    so the stream itself is turned away meanwhile. Python's errors are still seen.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    sys.stderr.flush()
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
