"""Checks this machine for causes of failures and slow runs: `--mode=doctor`."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfgpipe._compat import TENSORFLOWS, installed_tensorflows, native_logging_off
from tfgpipe_trainer import findings, listing
from tfgpipe_trainer.experiment import Experiment
from tfgpipe_trainer.findings import Finding
from tfgpipe_trainer.hyperparams import HyperparameterError, override

if TYPE_CHECKING:
    from tfgpipe.planner import Workload

_OPTIONAL = {
    "matplotlib": "losses.png and other pictures",
    "tensorboard": "curves and profiles",
    "scikit-learn": "the digits of image.* and parallelism.*",
    "grain": "examples that are shuffled and read ahead",
    "google-crc32c": "TFRecord files",
    "tokenizers": "language models over the tokens of a tokenizer.json",
    "sentencepiece": "language models over the tokens of a SentencePiece model",
}
# They require `tensorflow`, which is not installed beside one of another name.
_OF_TENSORFLOW = frozenset({"tensorflow-model-optimization"})
# Those that the documents take for workers; each has its health check on the next.
_PORTS = (4000, 4001)


def run(
    experiment: Experiment | None, *, name: str, logdir: str, device: str = "auto"
) -> int:
    """Prints what was found and returns the exit status: 1 if something fails, else 0.

    Args:
        experiment: The experiment to train, or None to check the machine alone.
        name: Its name.
        logdir: The run's folder, or empty for the working directory.
        device: `"cpu"` to leave GPUs aside.
    """
    machine = Machine(device=device)
    sections: dict[str, Iterator[Finding]] = {
        "Versions": _versions(),
        "Devices": machine.devices(),
        "CPU": machine.cpu(),
        "Disk": check_folder(Path(logdir or ".")),
        "Ports": map(check_port, (0, *_PORTS)),
        "Optional packages": _optional(),
    }
    if experiment is not None:
        sections[name] = _experiment(experiment, machine, Path(logdir or "."))
    fails = 0
    for title, found in sections.items():
        print(f"\n{title}", flush=True)
        for each in found:
            print(each, flush=True)
            fails += each.level == "fails"
    print(f"\n{fails or 'Nothing'} fail{'s' * (fails < 2)}.", flush=True)
    return 1 if fails else 0


class Machine:
    """This machine, as its system and packages describe it.

    Args:
        device: `"cpu"` to leave GPUs aside.

    Attributes:
        num_cores: Cores that this process may use.
        gpus: Names of the GPUs that TensorFlow sees.
        gpu_memory: Bytes of each, where nvidia-smi says it.
    """

    def __init__(self, *, device: str) -> None:
        self._takes_gpus = device == "auto"
        # Not every system has the first.
        affinity = getattr(os, "sched_getaffinity", None)
        self.num_cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        self.gpus: list[str] = []
        self.gpu_memory: list[int] = []
        flags = re.search(r"^flags\s*: (.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
        self._flags = frozenset(flags[1].split() if flags else ())

    @property
    def available(self) -> int:
        """Free bytes of main memory."""
        return min(self._memory("MemAvailable"), _limit("memory.max"))

    def devices(self) -> Iterator[Finding]:
        """Yields findings on GPUs."""
        try:
            with native_logging_off():
                import tensorflow as tf

                found = tf.config.list_physical_devices("GPU")
        except Exception as error:  # Whatever a broken installation raises.
            reason = str(error).partition("\n")[0]
            yield Finding("fails", f"TensorFlow cannot be imported: {reason}")
            return
        if self._takes_gpus:
            details = tf.config.experimental.get_device_details
            names = [details(gpu).get("device_name", "of no name") for gpu in found]
            self.gpu_memory = _gpu_memory()[: len(names)]
            sizes = self.gpu_memory + [0] * len(names)
            self.gpus = [
                f"{name}, {size / findings.GIB:.0f} GiB" if size else name
                for name, size in zip(names, sizes, strict=False)
            ]
        yield from findings.check_gpus(
            self.gpus,
            num_there=listing.num_gpus_there() if self._takes_gpus else 0,
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )

    def cpu(self) -> Iterator[Finding]:
        """Yields findings on cores, memory and settings."""
        num_here = os.cpu_count() or self.num_cores
        load = os.getloadavg()[0]
        yield from findings.check_cores(self.num_cores, num_here=num_here, load=load)
        quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
        share = int(quota) / int(period) if quota.isdigit() else None
        yield from findings.check_quota(share, self.num_cores)
        total = min(self._memory("MemTotal"), _limit("memory.max"))
        yield findings.check_memory(total=total, available=self.available)
        environment, flags = os.environ, self._flags
        setting = environment.get("TF_ENABLE_ONEDNN_OPTS")
        yield from findings.check_instructions(flags)
        if flags:
            yield findings.check_onednn(setting, flags)
        yield from findings.check_threads(environment, self.num_cores)
        yield from findings.check_malloc(
            environment,
            has_onednn=findings.has_onednn(setting, flags),
            has_gpus=bool(self.gpus),
        )

    def _memory(self, name: str) -> int:
        found = re.search(rf"^{name}: *(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
        pages = os.sysconf("SC_PHYS_PAGES")
        return 1024 * int(found[1]) if found else pages * os.sysconf("SC_PAGE_SIZE")


def _text(path: str) -> str:
    """Returns the content of a file of the system, or an empty text."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _limit(name: str) -> int:
    """Returns the limit of a container in bytes, or a number above any."""
    text = _text(f"/sys/fs/cgroup/{name}").strip()
    return int(text) if text.isdigit() else 2**62


def _gpu_memory() -> list[int]:
    """Returns the bytes of each GPU, or nothing where nvidia-smi does not say them."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(
            query, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [2**20 * int(line) for line in said.stdout.split() if line.isdigit()]


def _installed(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _ranges(*, extras: bool) -> dict[str, str]:
    """Returns supported versions by package: of tfgpipe itself, or of its extras."""
    try:
        lines = importlib.metadata.requires("tfgpipe") or ()
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in lines:
        wanted = re.match(r"([\w.-]+)\s*([<>=!,\d.\s]*)", line)
        if wanted and ("extra ==" in line) == extras:
            name, bounds = wanted[1], wanted[2].replace(" ", "")
            found[name] = ",".join(sorted(bounds.split(","), reverse=True))
    return found


def _versions() -> Iterator[Finding]:
    yield Finding("ok", f"Python {platform.python_version()}.")
    yield findings.check_version("tfgpipe", installed=_installed("tfgpipe"))
    tensorflows = installed_tensorflows()
    for name, supported in _ranges(extras=False).items():
        if name in TENSORFLOWS:
            yield findings.check_tensorflow(
                tensorflows, required=name, supported=supported
            )
        elif name not in _OF_TENSORFLOW or "tensorflow" in tensorflows:
            yield findings.check_version(
                name, installed=_installed(name), supported=supported
            )


def _optional() -> Iterator[Finding]:
    ranges = _ranges(extras=True)
    for name, purpose in _OPTIONAL.items():
        yield findings.check_optional(
            name,
            installed=_installed(name),
            supported=ranges.get(name, ""),
            purpose=purpose,
        )


def _existing(folder: Path) -> Path:
    """Returns the nearest folder that is there."""
    return next(
        each for each in (folder.resolve(), *folder.resolve().parents) if each.is_dir()
    )


def check_folder(folder: Path) -> Iterator[Finding]:
    """Yields whether a run can be written to a folder, or to the nearest there is."""
    there = _existing(folder)
    free = shutil.disk_usage(there).free
    yield findings.check_disk(free=free, folder=str(there))
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".doctor-") as own:
            with open(f"{own}/written", "wb") as file:
                file.write(b"1")
                file.flush()
                os.fsync(file.fileno())
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(f"{own}/written", f"{own}/renamed")
    except OSError as error:
        yield Finding(
            "fails",
            f"In {there} a file cannot be written, locked and renamed: "
            f"{error.strerror}. Give another --logdir.",
        )
    else:
        yield Finding("ok", f"In {there} files can be written, locked and renamed.")


def check_port(port: int) -> Finding:
    """Listens on a port of 127.0.0.1 for a moment; 0 for any."""
    error = ""
    try:
        with socket.create_server(("127.0.0.1", port)):
            pass
    except OSError as refused:
        error = refused.strerror or str(refused)
    return findings.check_port(port, error)


def _experiment(
    experiment: Experiment, machine: Machine, folder: Path
) -> Iterator[Finding]:
    """Yields findings on an experiment on this machine."""
    pipelining = experiment.pipelining
    yield findings.check_devices(
        pipelining.num_devices,
        num_gpus=len(machine.gpus),
        num_cores=machine.num_cores,
    )
    described = listing.describe(
        type(experiment).__name__, type(experiment).__doc__ or ""
    )
    yield from findings.check_accelerators(
        described.num_accelerators, there=len(machine.gpus)
    )
    data = list(_data(experiment))
    yield from data
    # A model may have sizes of its data.
    if data[-1].level != "fails":
        yield from _size(experiment, machine, folder)


def _data(experiment: Experiment) -> Iterator[Finding]:
    """Reads a batch of each split."""
    import tensorflow as tf

    from tfgpipe_trainer.data import sources

    try:
        for split in ("train", "validation"):
            next(iter(experiment.batches(split)))
        experiment.check()
    except (HyperparameterError, ImportError) as error:
        yield Finding("fails", _one_line(error))
    except tf.errors.OpError as error:
        yield Finding("fails", _one_line(sources.record_error(error) or error.message))
    except StopIteration:
        yield Finding("fails", f"Its {split} split is empty.")
    else:
        yield Finding("ok", "A batch of its training and validation data can be read.")


def _size(experiment: Experiment, machine: Machine, folder: Path) -> Iterator[Finding]:
    """Yields findings on its memory and its checkpoints."""
    from tfgpipe import planner

    try:
        workload = planner.read(lambda: _network(experiment))
        peaks = _peaks(workload, experiment, on_gpus=bool(machine.gpus))
    except (HyperparameterError, TypeError, ValueError) as error:
        yield Finding("ok", f"Its memory is not estimated: {_one_line(error)}")
        return
    yield findings.check_estimate(
        peaks,
        gpu_memory=machine.gpu_memory[: experiment.pipelining.num_devices],
        available=machine.available,
    )
    # Weights and slots, without gradients; one more while the last is written.
    size = workload.parameters * (findings.BYTES_PER_WEIGHT - 4)
    there = _existing(folder)
    yield findings.check_disk(
        free=shutil.disk_usage(there).free,
        folder=str(there),
        needed=math.ceil(size) * (experiment.saving.keep + 1),
    )


def _network(experiment: Experiment) -> Any:
    # Layers in shards would need their devices.
    whole = override(experiment, ["pipelining.num_shards=1"])
    with whole.precision.scope():
        return whole.network()


def _peaks(workload: Workload, experiment: Experiment, *, on_gpus: bool) -> list[float]:
    """Returns the estimated bytes of each device, as the planner has them."""
    from tfgpipe import planner, remat, schedules

    chosen = experiment.pipelining
    # Of its figures only what the runtime reserves counts here, and a CPU does not.
    device = planner.TABLE["h100-80g"]
    request = planner.PlanRequest(
        workload,
        device=device if on_gpus else dataclasses.replace(device, reserved=0.0),
        num_devices=chosen.num_devices,
        batch_size=experiment.training.batch_size,
    )
    config = planner.ParallelConfig(
        num_replicas=chosen.num_replicas,
        num_devices=chosen.num_stages // chosen.num_stages_each,
        num_shards=chosen.num_shards,
        num_microbatches=chosen.num_microbatches,
        schedule=schedules.find(chosen.schedule),
        remat=remat.find(chosen.remat),
        stages_per_device=chosen.num_stages_each,
    )
    held = request.memory(config, request.partition(config))
    copies = chosen.num_replicas * chosen.num_shards
    return [each.total for each in held for _ in range(copies)]


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
