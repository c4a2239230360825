"""Device names: kinds, short names, hosts, and the devices there are."""

from __future__ import annotations

import tensorflow as tf

TPU_CORE = "TPU_REPLICATED_CORE"


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

    >>> device_type("/device:GPU:1"), device_type(tpu_core_name(1))
    ('GPU', 'TPU')
    """
    device_type = tf.DeviceSpec.from_string(device).device_type
    return "TPU" if device_type == TPU_CORE else device_type


def tpu_core_name(k: int) -> str:
    """Returns the name that core `k` of a replica has in a computation on TPUs.

    Such a computation is written down once for all replicas.
    """
    return f"/device:{TPU_CORE}:{k}"


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

    Args:
        name: What is ordered. Tokens of one name on one device are the same.
    """
    with tf.control_dependencies(None):
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=(), shared_name=name)


def default_devices() -> list[str]:
    """Returns the devices a mesh has to choose from when none are named.

    In a cluster those of the workers, the first of each before the second of any.
    """
    workers = devices_of_workers()
    if not workers:
        return visible_devices("GPU") or visible_devices("CPU")
    most = max(map(len, workers))
    return [names[i] for i in range(most) for names in workers if i < len(names)]


def devices_of_workers() -> list[list[str]]:
    """Returns the devices of each worker of the cluster that we are connected to."""
    hosts: dict[str, list[str]] = {}
    for name in visible_devices():
        if is_remote(name):
            hosts.setdefault(host_device(name), []).append(name)
    return [[n for n in v if device_type(n) == "GPU"] or v for v in hosts.values()]


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


def device_advice(num_devices: int) -> str:
    """Returns what to try where there are fewer devices than that."""
    return (
        "Use fewer stages, or make logical devices before TensorFlow starts: "
        f"`tfgpipe.make_logical_cpus({num_devices})`."
    )
