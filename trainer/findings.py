"""What a machine's properties mean for training: sentences of plain values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from tfgpipe._util import readable_bytes

GIB = 2**30
# What TensorFlow itself takes in main memory, with a small model.
_TENSORFLOW = 1 * GIB
# Checkpoints of the smaller experiments, and what is written beside them.
_LITTLE_DISK = 1 * GIB
# Bytes of a weight: itself, its gradient, two slots of an optimizer such as AdamW.
BYTES_PER_WEIGHT = 16


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: `"ok"`; `"slow"` where training works, worse than it could; or `"fails"`.
        text: A sentence or two, without a line break.
    """

    level: Literal["ok", "slow", "fails"]
    text: str

    def __str__(self) -> str:
        return f"{self.level:5}  {self.text}"


def check_version(name: str, *, installed: str | None, supported: str = "") -> Finding:
    """Compares a version with the range that is supported.

    >>> print(check_version("keras", installed="3.16.0", supported=">=3.14,<3.16"))
    fails  keras 3.16.0; expected >=3.14,<3.16: `pip install 'keras>=3.14,<3.16'`.

    Args:
        name: The package.
        installed: Its version, or None if it is not installed.
        supported: Bounds such as `">=3.14,<3.16"`; empty for any version.
    """
    if installed is None:
        return Finding(
            "fails", f"{name} is not installed: `pip install '{name}{supported}'`."
        )
    if not _is_within(installed, supported):
        return Finding(
            "fails",
            f"{name} {installed}; expected {supported}: "
            f"`pip install '{name}{supported}'`.",
        )
    return Finding("ok", f"{name} {installed}{supported and f' ({supported})'}.")


def check_tensorflow(
    installed: Mapping[str, str], *, required: str, supported: str
) -> Finding:
    """Compares the TensorFlow that is installed, of whatever name, with the range.

    >>> found = {"tensorflow-tpu": "2.20.0"}
    >>> print(check_tensorflow(found, required="tensorflow", supported=">=2.20,<2.22"))
    ok     tensorflow-tpu 2.20.0 (>=2.20,<2.22).

    Args:
        installed: Versions by the name of the distribution.
        required: The distribution that tfgpipe was installed with.
        supported: The range of versions that is tested.
    """
    if len(installed) > 1:
        found = " and ".join(f"{name} {installed[name]}" for name in installed)
        return Finding(
            "fails",
            f"{found} are installed, and have the same files: `pip uninstall "
            f"{' '.join(installed)}`, then install one of them.",
        )
    name, version = next(iter(installed.items()), (required, None))
    return check_version(name, installed=version, supported=supported)


def _is_within(version: str, bounds: str) -> bool:
    compare = {
        ">=": lambda order: order >= 0,
        "<=": lambda order: order <= 0,
        "==": lambda order: order == 0,
        "!=": lambda order: order != 0,
        "<": lambda order: order < 0,
        ">": lambda order: order > 0,
    }
    found = re.findall(r"([<>=!]=|<|>)\s*([\d.]+)", bounds)
    return all(compare[sign](_order(version, bound)) for sign, bound in found)


def _order(a: str, b: str) -> int:
    """Returns -1, 0 or 1 as the release a is before, of, or after b."""
    one, other = (
        [int(number) for number in re.findall(r"\d+", re.split(r"[a-z+]", text)[0])]
        for text in (a, b)
    )
    length = max(len(one), len(other))
    one += [0] * (length - len(one))
    other += [0] * (length - len(other))
    return (one > other) - (one < other)


def check_optional(
    name: str, *, installed: str | None, purpose: str, supported: str = ""
) -> Finding:
    """Reports an optional package and its purpose; a missing one is no fault.

    Args:
        name: The package.
        installed: Its version, or None if it is not installed.
        purpose: Its purpose, in the message.
        supported: The range of versions that is tested.
    """
    if installed is None:
        return Finding(
            "ok", f"{name} is not installed: `pip install {name}` for {purpose}."
        )
    found = check_version(name, installed=installed, supported=supported)
    return Finding(found.level, f"{found.text[:-1]}, for {purpose}.")


def check_gpus(
    seen: Sequence[str], *, num_there: int, visible: str | None
) -> list[Finding]:
    """Lists the GPUs that TensorFlow uses, and those that it does not.

    Args:
        seen: Names of those that TensorFlow sees.
        num_there: Number of NVIDIA GPUs of the system.
        visible: The value of `CUDA_VISIBLE_DEVICES`, or None where it is not set.
    """
    found = [Finding("ok", f"GPU:{i} is {name}.") for i, name in enumerate(seen)]
    unused = num_there - len(seen)
    if unused > 0 and visible is not None:
        found.append(
            Finding(
                "ok" if seen else "slow",
                f"CUDA_VISIBLE_DEVICES={visible} hides {unused} of {num_there} GPUs.",
            )
        )
    elif unused > 0:
        found.append(
            Finding(
                "slow",
                f"TensorFlow sees {len(seen)} of {num_there} NVIDIA GPUs. Try `pip "
                "install 'tensorflow[and-cuda]'`, and compare the driver's version.",
            )
        )
    if not seen:
        found.append(
            Finding(
                "ok",
                "TensorFlow uses no GPU: an experiment trains on the CPU, which is "
                "split into as many logical devices as it asks for.",
            )
        )
    return found


def check_cores(num_cores: int, *, num_here: int, load: float) -> list[Finding]:
    """Checks the number of cores of this process, and their load by others.

    Args:
        num_cores: Cores that this process may use.
        num_here: Cores of the machine.
        load: Processes that ran or wanted to, on average over the last minute.
    """
    least = 2
    found = [
        Finding(
            "ok" if num_cores >= least else "slow",
            f"{_count(num_cores, 'core')} of {num_here} for this process"
            + ("." if num_cores >= least else ": stages run one after another."),
        )
    ]
    free = num_here - load
    if free < num_cores / 2:
        found.append(
            Finding(
                "slow",
                f"Load {load:.1f} in the last minute, on {_count(num_here, 'core')}: "
                "steps wait for other programs.",
            )
        )
    else:
        found.append(Finding("ok", f"Load {load:.1f} in the last minute."))
    return found


def check_quota(quota: float | None, num_cores: int) -> list[Finding]:
    """Checks that a container has CPU time for all cores that it shows.

    Args:
        quota: Cores' worth of time that it may use, or None for no limit.
        num_cores: Cores that it shows.
    """
    if quota is None or quota >= num_cores:
        return []
    return [
        Finding(
            "slow",
            f"The container may use {quota:.1f} cores' worth of time and shows "
            f"{num_cores}: threads wait for one another. Set "
            f"TF_NUM_INTRAOP_THREADS={max(1, int(quota))}.",
        )
    ]


def check_memory(*, total: int, available: int) -> Finding:
    """Checks that there is enough main memory.

    Args:
        total: Bytes that this process may have at most.
        available: Bytes that nobody uses.
    """
    text = f"{readable_bytes(available)} of {readable_bytes(total)} of memory are free"
    if available < _TENSORFLOW:
        return Finding("fails", f"{text}; TensorFlow itself takes 1 GiB. End others.")
    if available < 2 * _TENSORFLOW:
        return Finding("slow", f"{text}: enough for the smallest experiments alone.")
    return Finding("ok", f"{text}.")


def check_instructions(flags: Collection[str]) -> list[Finding]:
    """Checks an x86 processor for the instructions that TensorFlow is built for.

    Args:
        flags: Flags in `/proc/cpuinfo`; empty on other processors.
    """
    if not flags:
        return []
    if "avx" not in flags:
        return [Finding("fails", "No AVX, which TensorFlow's wheels are built for.")]
    if "avx512f" in flags:
        vnni = " with VNNI" if "avx512_vnni" in flags else ""
        return [Finding("ok", f"The processor has AVX-512{vnni}.")]
    return [
        Finding(
            "ok" if "avx2" in flags else "slow",
            f"The processor has {'AVX2' if 'avx2' in flags else 'AVX'}, no AVX-512.",
        )
    ]


def has_onednn(setting: str | None, flags: Collection[str]) -> bool:
    """Returns whether TensorFlow uses oneDNN for most operations.

    Args:
        setting: The value of `TF_ENABLE_ONEDNN_OPTS`, or None where it is not set.
        flags: The processor's: it is on by itself with AVX-512 VNNI or AVX-VNNI.
    """
    if setting is not None:
        return setting.lower() in ("1", "true")
    return bool({"avx512_vnni", "avx_vnni"} & set(flags))


def check_onednn(setting: str | None, flags: Collection[str]) -> Finding:
    """Reports whether TensorFlow uses oneDNN for most operations: see `has_onednn`."""
    name = "TF_ENABLE_ONEDNN_OPTS"
    if has_onednn(setting, flags):
        why = f"by {name}={setting}" if setting else "by itself on this processor"
        return Finding("ok", f"oneDNN's operations are on, {why}.")
    why = f"by {name}={setting}" if setting else "as the processor has no VNNI"
    return Finding(
        "slow",
        f"oneDNN's operations are off, {why}: {name}=1 makes large steps on a CPU "
        "faster. Not in the middle of a run: it rounds differently.",
    )


def check_threads(environment: Mapping[str, str], num_cores: int) -> list[Finding]:
    """Checks that no variable keeps TensorFlow from using all cores.

    Args:
        environment: The variables.
        num_cores: Cores that this process may use.
    """
    found = []
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        text = environment.get(name)
        if text is None:
            continue
        if not text.isdigit():
            found.append(
                Finding("slow", f"{name}={text} is no number: it is passed over.")
            )
        elif 0 < int(text) < num_cores:
            found.append(
                Finding("slow", f"{name}={text} leaves some of {num_cores} cores idle.")
            )
        else:
            found.append(Finding("ok", f"{name}={text}."))
    if "OMP_NUM_THREADS" in environment:
        text = environment["OMP_NUM_THREADS"]
        found.append(
            Finding("ok", f"OMP_NUM_THREADS={text}, which TensorFlow does not read.")
        )
    return found or [Finding("ok", "No variable limits TensorFlow's threads.")]


def check_malloc(
    environment: Mapping[str, str], *, has_onednn: bool, has_gpus: bool
) -> list[Finding]:
    """Checks glibc's handling of freed tensors, where it matters.

    Args:
        environment: The variables.
        has_onednn: True if oneDNN's operations are on; they have their own pool.
        has_gpus: True if tensors are on GPUs.
    """
    name = "MALLOC_MMAP_THRESHOLD_"
    text = environment.get(name)
    if has_gpus or (has_onednn and text is None):
        return []
    if text is None:
        return [
            Finding(
                "slow",
                "glibc gives freed tensors back and asks for them anew: "
                f"MALLOC_TRIM_THRESHOLD_=8589934592 {name}=1073741824 keeps them "
                "(docs/how-to/settings.md#on-cpus).",
            )
        ]
    if text.isdigit() and int(text) < 2**20:
        return [Finding("slow", f"{name}={text} saves memory and costs time.")]
    return [Finding("ok", f"{name}={text}.")]


def check_disk(*, free: int, folder: str, needed: int = 0) -> Finding:
    """Checks that there is room for checkpoints.

    Args:
        free: Free bytes.
        folder: The folder to write to.
        needed: Bytes that the checkpoints of an experiment take, or 0: not known.
    """
    text = f"{readable_bytes(free)} are free in {folder}"
    if needed > free:
        return Finding("fails", f"{text}; checkpoints take {readable_bytes(needed)}.")
    if needed:
        return Finding("ok", f"{text}; checkpoints take {readable_bytes(needed)}.")
    if free < _LITTLE_DISK:
        return Finding("fails", f"{text}: make room, or give another --logdir.")
    return Finding("ok", f"{text}.")


def check_port(port: int, error: str) -> Finding:
    """Checks that a process can listen on a port of this host.

    Args:
        port: The port; 0 for any.
        error: The system's error, or an empty text.
    """
    name = f"Port {port}" if port else "A port"
    if not error:
        return Finding("ok", f"{name} of 127.0.0.1 can be listened on.")
    if port:
        # Nobody has to use it.
        return Finding("ok", f"{name} is not free ({error}): give workers another.")
    return Finding("fails", f"No port of 127.0.0.1 can be listened on: {error}.")


def check_devices(num_devices: int, *, num_gpus: int, num_cores: int) -> Finding:
    """Compares the devices of an experiment with those there.

    Args:
        num_devices: D x K x T.
        num_gpus: GPUs that TensorFlow sees.
        num_cores: Cores that this process may use.
    """
    asked = _count(num_devices, "device")
    if num_gpus >= num_devices:
        return Finding("ok", f"It asks for {asked}; there are {num_gpus} GPUs.")
    if num_gpus:
        return Finding(
            "fails",
            f"It asks for {asked}; there are {num_gpus} GPUs. Set "
            "pipelining.num_stages, num_replicas or num_shards, or --device=cpu.",
        )
    if num_devices > num_cores:
        return Finding(
            "slow",
            f"It asks for {asked}, which share {_count(num_cores, 'core')} as logical "
            "devices: none is faster for it.",
        )
    return Finding("ok", f"It asks for {asked}: logical ones, of {num_cores} cores.")


def check_accelerators(needed: int, *, there: int) -> list[Finding]:
    """Compares what an experiment's docstring asks for with what is there.

    Args:
        needed: Accelerators; 0 where CPU cores do.
        there: Accelerators of this machine.
    """
    if needed <= there:
        return []
    return [
        Finding(
            "slow",
            f"It is made for {_count(needed, 'accelerator')}; there are {there}. On "
            "CPU cores it takes many times as long.",
        )
    ]


def check_estimate(
    peaks: Sequence[float], *, gpu_memory: Sequence[int], available: int
) -> Finding:
    """Compares an estimate of the memory of a step with what there is.

    Args:
        peaks: Estimated bytes of each device.
        gpu_memory: Bytes of each GPU that is used; empty on a CPU.
        available: Free bytes of main memory, which logical devices share.
    """
    if gpu_memory:
        needed, there = max(peaks), float(min(gpu_memory))
        where = "on the fullest device; the smallest GPU has"
    else:
        needed, there = sum(peaks) + _TENSORFLOW, float(available)
        where = "in all, TensorFlow's own 1 GiB included; free are"
    text = f"It takes about {readable_bytes(needed)} {where} {readable_bytes(there)}."
    if needed <= there:
        return Finding("ok", text)
    return Finding(
        "fails",
        f"{text} Try a smaller training.batch_size, more "
        "pipelining.num_microbatches or num_stages, or pipelining.remat=layer.",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
