"""Device names: kinds, short names, hosts, and the devices there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfgpipe.devices import tpu_topology


def local_device_type(num_devices: int) -> str:
    """Returns the type of device that a process uses, without starting TensorFlow.

    Raises:
        ValueError: If it has fewer.
    """
    gpus = tf.config.list_physical_devices("GPU")
    (cpu,) = tf.config.list_physical_devices("CPU")
    cpus = tf.config.get_logical_device_configuration(cpu) or [None]
    kind, count = ("GPU", len(gpus)) if gpus else ("CPU", len(cpus))
    if count < num_devices:
        raise ValueError(
            f"{num_devices} stages need {num_devices} devices in each process. "
            f"Received {count} of kind {kind}. {device_advice(num_devices)}"
        )
    return kind


def device_type(device: str) -> str:
    """Returns `"CPU"`, `"GPU"` or `"TPU"` for a device name.

    >>> device_type("/device:GPU:1")
    'GPU'
    """
    if _assumed_types:
        return _assumed_types[-1]
    return tf.DeviceSpec.from_string(device).device_type


@contextlib.contextmanager
def assumed_device_type(kind: str | None) -> Iterator[None]:
    """Has `device_type` return `"TPU"`, say, for all devices; with None, their own.

    In all threads, since TensorFlow's strategies trace each replica in one of its own.
    """
    if kind is None:
        yield
        return
    _assumed_types.append(kind)
    try:
        yield
    finally:
        _assumed_types.pop()


_assumed_types: list[str] = []


def host_device(device: str) -> str:
    """Returns the CPU of the machine that a device is in.

    >>> host_device("/job:localhost/replica:0/task:0/device:GPU:1")
    '/job:localhost/replica:0/task:0/device:CPU:0'
    """
    cpu = tf.DeviceSpec(device_type="CPU", device_index=0)
    return tf.DeviceSpec.from_string(device).make_merged_spec(cpu).to_string()


def short_name(device: str) -> str:
    """Returns a device's name for people: shorter where it cannot be another one.

    >>> short_name("/job:localhost/replica:0/task:0/device:GPU:1")
    'GPU:1'
    >>> short_name("/job:worker/replica:0/task:3/device:GPU:1")
    'worker:3/GPU:1'
    """
    short = device.rsplit("device:", 1)[-1]
    if not is_remote(device):
        return short
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.job}:{spec.task}/{short}"


def is_remote(device: str) -> bool:
    """Returns whether a device, of which the full name is given, is a worker's."""
    return device.startswith("/job:") and not device.startswith("/job:localhost/")


def ordering_token(name: str) -> tf.Tensor:
    """Returns a resource that orders operations, and holds nothing.

    Outside of the graph that is being traced: within it TensorFlow orders the making of
    a resource among all stateful operations, so that a replica's would wait for those
    of the replica that was traced before, and these for its share of a sum.

    Args:
        name: Name of the sequence that is ordered. Tokens of one name on one device are
            the same.
    """
    with tf.init_scope():
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=(), shared_name=name)


def default_devices() -> list[str]:
    """Returns the devices a mesh has to choose from when none are named.

    TPUs before GPUs before logical CPUs; in a cluster those of the workers, the first
    of each before the second of any.
    """
    workers = devices_of_workers()
    if not workers:
        kinds = map(visible_devices, ("TPU", "GPU", "CPU"))
        return next(filter(None, kinds))
    most = max(map(len, workers))
    return [names[i] for i in range(most) for names in workers if i < len(names)]


def devices_of_workers() -> list[list[str]]:
    """Returns the devices of each worker of the cluster that we are connected to."""
    hosts: dict[str, list[str]] = {}
    for name in visible_devices():
        if is_remote(name):
            hosts.setdefault(host_device(name), []).append(name)
    return [_accelerators(names) or names for names in hosts.values()]


def _accelerators(names: list[str]) -> list[str]:
    return [name for name in names if device_type(name) in ("TPU", "GPU")]


def visible_devices(device_type: str | None = None) -> list[str]:
    """Returns the full names of the logical devices, of one type if it is given."""
    devices = tf.config.list_logical_devices(device_type)
    return [full_device_name(device.name) for device in devices]


def full_device_name(device: str) -> str:
    """Completes `"GPU:0"` to the form in which TensorFlow reports a tensor's device.

    >>> full_device_name("gpu:1")
    '/job:localhost/replica:0/task:0/device:GPU:1'
    >>> full_device_name("/job:worker/task:2/CPU:0")
    '/job:worker/replica:0/task:2/device:CPU:0'
    """
    if device.startswith("/job:"):
        spec = tf.DeviceSpec.from_string(device)
        return tf.DeviceSpec(replica=0, task=0).make_merged_spec(spec).to_string()
    kind, _, index = short_name(device).lstrip("/").upper().partition(":")
    return f"/job:localhost/replica:0/task:0/device:{kind}:{index or 0}"


def tpu_devices(
    slice_topology: tf.tpu.experimental.Topology,
    *,
    num_stages: int,
    num_replicas: int = 1,
    torus: tpu_topology.Torus = (False, False, False),
) -> list[str]:
    """Returns TPUs for the `devices` of a strategy, neighbouring stages side by side.

    That is on one chip or on neighbouring chips. Any other order is as correct.

    Example (which needs TPUs):

        resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
        tf.config.experimental_connect_to_cluster(resolver)
        topology = tf.tpu.experimental.initialize_tpu_system(resolver)
        devices = tfgpipe.devices.tpu_devices(topology, num_stages=4)
        strategy = tfgpipe.PipelineStrategy(num_stages=4, devices=devices)

    Args:
        slice_topology: The result of `tf.tpu.experimental.initialize_tpu_system`.
        num_stages: K, the number of stages, each on a core of its own.
        num_replicas: D, the number of copies of the pipeline.
        torus: For x, y and z, whether the last chip is next to the first, as in v4
            slices of whole cubes and in a whole v5e pod. Helps only where chips are
            missing.

    Raises:
        ValueError: If the slice is too small for K * D cores.
    """
    there = {}
    for name in visible_devices("TPU"):
        spec = tf.DeviceSpec.from_string(name)
        there[spec.task, spec.device_index] = name
    replicas = tpu_topology.assign_slice_cores(
        slice_topology, num_stages=num_stages, num_replicas=num_replicas, torus=torus
    )
    return [
        there[
            slice_topology.task_ordinal_at_coordinates(core),
            slice_topology.tpu_device_ordinal_at_coordinates(core),
        ]
        for cores in replicas
        for core in cores
    ]


def device_advice(num_devices: int) -> str:
    """Returns a hint for a machine with fewer devices than that."""
    return (
        "Use fewer stages, or make logical devices before TensorFlow starts: "
        f"`tfgpipe.make_logical_cpus({num_devices})`."
    )
