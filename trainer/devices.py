"""One device for each stage, arranged before TensorFlow starts."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfgpipe._compat import native_logging_off
from tfgpipe_trainer.config import Pipelining
from tfgpipe_trainer.errors import UsageError
from tfgpipe_trainer.hosts import ALONE, Hosts
from tfgpipe_trainer.hyperparams import HyperparameterError

if TYPE_CHECKING:
    from tfgpipe.cluster import Cluster


# More take longer to start than anybody waits.
_MOST_LOGICAL = 1024


def host_device() -> str:
    """Returns the device of this process' own memory, wherever variables are."""
    import tensorflow as tf

    with tf.device("CPU:0"):
        return str(tf.constant(0).device)


def memory_in_use() -> tuple[str, float]:
    """Returns the name of this process' fullest GPU, and the peak of its memory.

    Without GPUs, `"process"` and the bytes that it holds: NaN where no system says it.
    """
    import tensorflow as tf

    peaks = {
        f"GPU:{i}": tf.config.experimental.get_memory_info(f"GPU:{i}")["peak"]
        for i in range(len(tf.config.get_visible_devices("GPU")))
    }
    if peaks:
        fullest = max(peaks, key=lambda name: peaks[name])
        return fullest, float(peaks[fullest])
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return "process", math.nan
    return "process", float(pages * os.sysconf("SC_PAGE_SIZE"))


def peak_flops(policy: str) -> float:
    """Returns the FLOPs a second that a GPU here is said to do, NaN if not known.

    Args:
        policy: A policy of Keras' dtypes, such as `"mixed_bfloat16"`.
    """
    import tensorflow as tf

    from tfgpipe import planner

    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return math.nan
    details = tf.config.experimental.get_device_details(gpus[0])
    name = details.get("device_name", "").lower()
    for known, device in planner.TABLE.items():
        if known.partition("-")[0] in name:
            return device.flops.get(policy.removeprefix("mixed_"), math.nan)
    return math.nan


def start_tensorflow(
    pipelining: Pipelining,
    *,
    hosts: Hosts = ALONE,
    tpu: str = "",
    workers: str = "",
    device: str = "auto",
) -> Cluster | None:
    """Imports TensorFlow with enough devices: GPUs, or logical ones of the CPU.

    Args:
        pipelining: The number of devices.
        hosts: Hosts of the replicas, if there are several.
        tpu: The name of a TPU, which `scope` will find, or an empty one.
        workers: Workers whose devices are taken instead, such as `"10.0.0.5:4000"`.
        device: `"auto"`, for GPUs if there are any, or `"cpu"`.

    Returns:
        The cluster of the workers, if there are any.

    Raises:
        UsageError: If `workers` is no list of workers.
        HyperparameterError: If there are GPUs, and too few of them.
        ClusterError: If a worker is not there, or not fit.
    """
    _check_strategy(pipelining, hosts=hosts, tpu=tpu)
    num_devices = pipelining.num_devices // hosts.count
    with native_logging_off():
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        (cpu,) = tf.config.list_physical_devices("CPU")
    if tpu:
        return None
    if workers:
        from tfgpipe import cluster

        try:
            return cluster.connect(
                workers, replica=hosts.index, num_replicas=hosts.count
            )
        except ValueError as error:
            raise UsageError(f"--cluster: {error}") from None
    if gpus and device == "auto":
        _check_enough(gpus, num_devices, pipelining, hosts)
        return None
    why = "--device=cpu" if gpus else "no GPU is here"
    if num_devices > _MOST_LOGICAL:
        raise HyperparameterError(
            f"pipelining: expected at most {_MOST_LOGICAL} devices on the CPU, where "
            f"they are logical ones; received {num_devices}."
        )
    parts = f"{num_devices} logical devices" if num_devices > 1 else "one device"
    print(f"On the CPU, as {parts}: {why}.", flush=True)
    if gpus:
        tf.config.set_visible_devices([], "GPU")
    logical = tf.config.get_logical_device_configuration(cpu) or []
    if len(logical) < num_devices:
        import tfgpipe

        tfgpipe.make_logical_cpus(num_devices)
    return None


def _check_strategy(pipelining: Pipelining, *, hosts: Hosts, tpu: str) -> None:
    """Refuses what TPUs, or the strategy of several hosts, do not do."""
    if tpu and pipelining.num_shards != 1:
        raise HyperparameterError(
            "pipelining.num_shards: expected 1 for --tpu, where XLA compiles each "
            f"function of a stage for one device; received {pipelining.num_shards}."
        )
    if pipelining.resolved_stages_per_device > 1 and hosts.count > 1:
        raise HyperparameterError(
            "pipelining.schedule: expected one with one stage on a device, such as "
            f"1f1b, for several hosts; received {pipelining.schedule}."
        )


def _check_enough(
    gpus: Sequence[object], num_devices: int, pipelining: Pipelining, hosts: Hosts
) -> None:
    """Refuses to train with fewer GPUs than devices are asked for."""
    if len(gpus) >= num_devices:
        return
    stages = f"{pipelining.num_stages} stages"
    if pipelining.resolved_stages_per_device > 1:
        stages += f", {pipelining.resolved_stages_per_device} on a device,"
    raise HyperparameterError(
        f"pipelining: expected {num_devices} GPUs for {stages} x "
        f"{pipelining.num_replicas // hosts.count} replicas x "
        f"{pipelining.num_shards} shards; received {len(gpus)}. Ask for fewer by "
        "--set=pipelining.num_stages=K, num_replicas or num_shards, show more by "
        "CUDA_VISIBLE_DEVICES, or train on the CPU by --device=cpu."
    )


def scope(
    pipelining: Pipelining,
    *,
    hosts: Hosts = ALONE,
    tpu: str = "",
    tpu_zone: str = "",
) -> contextlib.AbstractContextManager[object]:
    """Returns the scope to build a model in: a strategy's for replicas or shards.

    Also for several stages on each device. Without these a model is placed in the same
    way outside any strategy.

    Args:
        pipelining: The numbers of stages, replicas and shards.
        hosts: Hosts of the replicas, if there are several.
        tpu: The name of a TPU, `"local"` for that of this machine, or an empty one.
        tpu_zone: The zone it is in, or an empty one for that of this machine.

    Raises:
        UsageError: If there is no such TPU.
        ClusterError: If another host is not there, or not fit.
        HyperparameterError: If there are too few devices, or cores of it.
    """
    D, T = pipelining.num_replicas, pipelining.num_shards
    if D * T * pipelining.resolved_stages_per_device == 1 and not tpu:
        return contextlib.nullcontext()
    import tfgpipe

    if hosts.count > 1 and hosts.role is not None:
        return tfgpipe.PipelineStrategy(num_stages=pipelining.num_stages).scope()
    if hosts.count > 1:
        num_stages = pipelining.num_stages
        return tfgpipe.MultiWorkerPipelineStrategy(num_stages=num_stages).scope()
    try:
        tpus = _tpus(pipelining, tpu, tpu_zone) if tpu else None
        return tfgpipe.PipelineStrategy(
            num_stages=pipelining.num_stages,
            num_replicas=D,
            num_shards=T,
            shard_replicas=pipelining.shard_replicas,
            devices=_dealt(pipelining, tpus),
        ).scope()
    except ValueError as error:
        raise HyperparameterError(f"pipelining: {error}") from None


def _dealt(pipelining: Pipelining, devices: list[str] | None) -> list[str] | None:
    """Returns the device of each shard of each stage, None for TensorFlow's first.

    The schedule says on which device of a replica a stage is.

    Args:
        pipelining: The mesh.
        devices: A device for each group of v stages, or None for TensorFlow's first.
    """
    v = pipelining.resolved_stages_per_device
    if v == 1:
        return devices
    from tfgpipe.devices import make_mesh

    there = make_mesh(
        num_stages=pipelining.num_stages // v,
        num_replicas=pipelining.num_replicas,
        num_shards=pipelining.num_shards,
        devices=devices,
    )
    return [
        device
        for replica in there.devices
        for p in pipelining.placement
        for device in replica[p]
    ]


def _tpus(pipelining: Pipelining, name: str, zone: str) -> list[str]:
    """Connects to a TPU; returns a device for each group of stages of a replica."""
    import tensorflow as tf

    from tfgpipe.devices import tpu_devices

    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            name, zone=zone or None
        )
        tf.config.experimental_connect_to_cluster(resolver)
        found = tf.tpu.experimental.initialize_tpu_system(resolver)
    except (OSError, ImportError, RuntimeError, ValueError, tf.errors.OpError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"--tpu={name}: no TPU was reached: {reason}. Give the name, or the "
            "grpc:// address, of a TPU that is running, and --tpu_zone=ZONE if it is "
            "in another zone than this machine; on a TPU VM --tpu=local, with a "
            "TensorFlow that is built for TPUs (docs/how-to/tpu.md)."
        ) from None
    return tpu_devices(
        found,
        num_stages=pipelining.num_stages // pipelining.resolved_stages_per_device,
        num_replicas=pipelining.num_replicas,
    )
