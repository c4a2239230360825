"""Private TensorFlow API: distribution strategies and device placement."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
    distribute_lib,
    multi_worker_util,
    numpy_dataset,
)
from tensorflow.python.eager import context as eager_context


@contextlib.contextmanager
def without_strategy() -> Iterator[None]:
    """Code inside sees no distribution strategy.

    TensorFlow has a scope for each strategy, but none for none.
    """
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


@contextlib.contextmanager
def eager_variables() -> Iterator[None]:
    """Code inside runs eagerly, and its variables belong to no function being traced.

    A `tf.function` that makes variables is traced a second time. It watches them made
    by a creator of less priority than those of strategies, which `tf.init_scope` keeps.
    """
    graph = tf.compat.v1.get_default_graph()
    creators = graph._variable_creator_stack
    graph._variable_creator_stack = [c for c in creators if c[0] != _OF_FUNCTIONS]
    try:
        with tf.init_scope():
            yield
    finally:
        graph._variable_creator_stack = creators


@contextlib.contextmanager
def host_variables() -> Iterator[None]:
    """Variables created inside are plain ones of this machine's first CPU.

    That is, whatever strategy or function is around: none of its creators is asked.
    """
    with tf.init_scope(), without_strategy(), tf.device("CPU:0"):
        graph = tf.compat.v1.get_default_graph()
        creators = graph._variable_creator_stack
        graph._variable_creator_stack = []
        try:
            yield
        finally:
            graph._variable_creator_stack = creators


_OF_FUNCTIONS = 50  # The priority of the creators of functions.


def colocation(devices: tuple[str, ...]) -> Any:
    """Returns a `colocate_with=` object that mirrors a variable over devices.

    On one device among several replicas a variable is not a mirrored one.

    Args:
        devices: One for each replica, or one alone.
    """
    if len(devices) > 1 or tf.distribute.get_strategy().num_replicas_in_sync == 1:
        # All that a strategy looks at in a mirrored variable.
        return types.SimpleNamespace(_devices=devices)
    return numpy_dataset.SingleDevice(devices[0])


def read_datasets_here(strategy: tf.distribute.Strategy) -> None:
    """Has a mirrored strategy on other hosts' devices read datasets in this process.

    By itself it makes their iterators on the first of those hosts, which then calls
    functions of datasets back here, and two clients of the same hosts wait for each
    other.
    """
    with tf.device("CPU:0"):
        here = tf.constant(0).device
    extended = strategy.extended
    extended._input_workers_devices = tuple(
        (here, devices) for _, devices in extended._input_workers_devices
    )


def set_heartbeat_timeout(cluster: tf.train.ClusterSpec, seconds: float) -> None:
    """Sets the seconds of silence after which TensorFlow takes a process for dead.

    The default is ten, and the error then names collective operations.
    `MultiWorkerMirroredStrategy` has no argument for it, and keeps a coordination
    service that is already configured. To be called before TensorFlow starts.
    """
    context = eager_context.context()
    context.configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(cluster),
        heartbeat_timeout_in_ms=int(1000 * seconds),
    )
    jobs = context.coordination_service.coordinated_job_list
    for job in cluster.jobs:
        jobs.add(name=job, num_tasks=cluster.num_tasks(job))
