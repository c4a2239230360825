"""Checks this machine, and an experiment on it, before a run: `--mode=doctor`."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from packaging.requirements import Requirement

from tfgpipe._compat import distributions, native_logging_off
from tfgpipe._util import readable_bytes
from tfgpipe_trainer.commands import catalog
from tfgpipe_trainer.experiment import Experiment
from tfgpipe_trainer.flags import Flags
from tfgpipe_trainer.hyperparams import HyperparameterError

_GIB = 2**30  # TensorFlow's own main memory, with a small model.
# Files of a container's limits.
_LIMITS = ("memory.max", "memory.current")
_EXTRAS = ("trainer", "tokenizer")
# They require `tensorflow`, which is not installed beside one of another name.
_OF_TENSORFLOW = frozenset({"tensorflow-model-optimization"})


class CheckResult(NamedTuple):
    """The result of one check; `"slow"` where training works, and could be faster."""

    level: Literal["ok", "slow", "fails"]
    text: str

    def __str__(self) -> str:
        return f"{self.level:5}  {self.text}"


def _ok(text: str) -> CheckResult:
    return CheckResult("ok", text)


def _fails(text: str) -> CheckResult:
    return CheckResult("fails", text)


def _slow_if(slow: bool, text: str) -> CheckResult:
    return CheckResult("slow" if slow else "ok", text)


def doctor(flags: Flags) -> int:
    """Prints the results and returns the exit status: 1 if something fails, else 0.

    Without --params it is about the machine alone, without --logdir about the disk of
    the working directory, and with --device=cpu not about GPUs.
    """
    experiment = flags.experiment() if flags.params else None
    has_gpus = flags.device == "auto"
    gpus = visible_gpus() if has_gpus else []
    sections = {
        "Versions": check_versions(),
        "Devices": check_gpus(gpus) if has_gpus else iter(()),
        "CPU": check_cpu(),
        "Disk": check_folder(Path(flags.logdir or ".")),
        "Optional packages": check_optional(),
    }
    if experiment is not None:
        sections[flags.params] = check_experiment(experiment, num_gpus=len(gpus))
    fails = 0
    for title, found in sections.items():
        print(f"\n{title}", flush=True)
        for each in found:
            print(each, flush=True)
            fails += each.level == "fails"
    print(f"\n{fails or 'Nothing'} fail{'s' * (fails < 2)}.", flush=True)
    return 1 if fails else 0


def check_version(requirement: Requirement, installed: str | None) -> CheckResult:
    """Compares an installed version, or None, with the range that is supported."""
    name, supported = requirement.name, requirement.specifier
    advice = f"`pip install '{name}{supported}'`."
    if installed is None:
        return _fails(f"{name} is not installed: {advice}")
    if not supported.contains(installed, prereleases=True):
        return _fails(f"{name} {installed}; expected {supported}: {advice}")
    return _ok(f"{name} {installed}{f' ({supported})' if str(supported) else ''}.")


def check_versions() -> Iterator[CheckResult]:
    """Yields results on Python and on what tfgpipe requires."""
    yield _ok(f"Python {platform.python_version()}.")
    yield check_version(Requirement("tfgpipe"), _installed("tfgpipe"))
    tensorflows = distributions.installed_tensorflows()
    for each in _required(None):
        if each.name in distributions.TENSORFLOWS:
            yield check_tensorflow(tensorflows, each)
        elif each.name not in _OF_TENSORFLOW or "tensorflow" in tensorflows:
            yield check_version(each, _installed(each.name))


def check_tensorflow(
    installed: Mapping[str, str], required: Requirement
) -> CheckResult:
    """Compares versions of TensorFlow, by the name of distribution, with a range."""
    if len(installed) > 1:
        found = " and ".join(f"{name} {installed[name]}" for name in installed)
        advice = f"`pip uninstall {' '.join(installed)}`, then install one of them."
        return _fails(f"{found} are installed, and have the same files: {advice}")
    name, version = next(iter(installed.items()), (required.name, None))
    return check_version(Requirement(f"{name}{required.specifier}"), version)


def check_optional() -> Iterator[CheckResult]:
    """Yields results on packages of extras, of which a missing one is no fault."""
    for extra in _EXTRAS:
        for each in _required(extra):
            version = _installed(each.name)
            missing = f"{each.name} is not installed, of tfgpipe[{extra}]."
            yield check_version(each, version) if version else _ok(missing)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _required(extra: str | None) -> list[Requirement]:
    """Returns the packages that tfgpipe requires, or an extra of its alone."""
    if _installed("tfgpipe") is None:
        return []
    found = map(Requirement, importlib.metadata.requires("tfgpipe") or ())
    if extra is None:
        return [each for each in found if not each.marker]
    return [x for x in found if x.marker and x.marker.evaluate({"extra": extra})]


def visible_gpus() -> list[str]:
    """Returns the names of the GPUs that TensorFlow uses."""
    with native_logging_off():
        import tensorflow as tf
    details = tf.config.experimental.get_device_details
    found = map(details, tf.config.list_physical_devices("GPU"))
    return [each.get("device_name", "of no name") for each in found]


def check_gpus(seen: Sequence[str]) -> Iterator[CheckResult]:
    """Yields results on the GPUs that TensorFlow uses, and on those it does not."""
    yield from (_ok(f"GPU:{i} is {name}.") for i, name in enumerate(seen))
    there, visible = catalog.num_gpus_there(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if there > len(seen):
        why = f"CUDA_VISIBLE_DEVICES={visible} hides the others."
        if visible is None:
            advice = "`pip install 'tensorflow[and-cuda]'`"
            why = f"Try {advice}, and compare the driver's version."
        text = f"TensorFlow sees {len(seen)} of {there} NVIDIA GPUs. {why}"
        yield _slow_if(not seen or visible is None, text)
    if not seen:
        yield _ok("TensorFlow uses no GPU: the CPU is split into logical devices.")


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    # Not every system has it.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else psutil.cpu_count() or 1


def available_memory() -> int:
    """Returns free bytes of main memory, within the limit of a container."""
    free = psutil.virtual_memory().available
    paths = map(Path("/sys/fs/cgroup").joinpath, _LIMITS)
    limit, used = (x.read_text().strip() if x.exists() else "" for x in paths)
    return min(free, int(limit) - int(used)) if limit.isdigit() else free


def check_cpu() -> Iterator[CheckResult]:
    """Yields results on cores, memory and the processor's instructions."""
    cores, here, load = num_cores(), psutil.cpu_count() or 1, psutil.getloadavg()[0]
    yield _slow_if(cores < 2, f"{cores} of {here} cores.")
    busy = here - load < cores / 2
    wait = ": steps wait for other programs" if busy else ""
    yield _slow_if(busy, f"Load {load:.1f} in the last minute{wait}.")
    free = available_memory()
    text = f"{readable_bytes(free)} of memory are free"
    if free < _GIB:
        yield _fails(f"{text}; TensorFlow itself takes 1 GiB.")
    else:
        yield _slow_if(free <= 2 * _GIB, f"{text}.")
    yield from check_instructions(os.environ)


def check_instructions(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Yields whether an x86 processor has AVX, and TensorFlow uses oneDNN on it."""
    cpus = Path("/proc/cpuinfo")
    text = cpus.read_text() if cpus.exists() else ""
    flags = re.search(r"^flags\s*: (.*)$", text, re.MULTILINE)
    if flags is None:
        return
    if "avx" not in flags[1].split():
        yield _fails("No AVX, which TensorFlow's wheels are built for.")
    setting = environment.get("TF_ENABLE_ONEDNN_OPTS", "").lower()
    # Without the variable it depends on these.
    is_on = not setting and re.search("avx512_vnni|avx_vnni", flags[1]) is not None
    if is_on or setting in ("1", "true"):
        yield _ok("oneDNN's operations are on.")
        return
    where = "see docs/how-to/settings.md#on-cpus (TF_ENABLE_ONEDNN_OPTS)"
    yield _slow_if(True, f"oneDNN's operations are off: {where}.")


def check_folder(folder: Path) -> Iterator[CheckResult]:
    """Yields whether a run can be written to a folder, or to the nearest there is."""
    above = folder.resolve()
    there = next(each for each in (above, *above.parents) if each.is_dir())
    free = psutil.disk_usage(str(there)).free
    text = f"{readable_bytes(free)} are free in {there}."
    yield _ok(text) if free > _GIB else _fails(text)
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".doctor-") as own:
            with open(f"{own}/written", "wb") as file:
                file.write(b"1")
                file.flush()
                os.fsync(file.fileno())
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(f"{own}/written", f"{own}/renamed")
    except OSError as error:
        what = f"In {there} a file cannot be written, locked and renamed"
        yield _fails(f"{what}: {error.strerror}. Give another --logdir.")


def check_experiment(experiment: Experiment, *, num_gpus: int) -> Iterator[CheckResult]:
    """Yields results on an experiment: its devices and its data."""
    asked, cores = experiment.pipelining.num_devices, num_cores()
    there = f"{num_gpus} GPUs" if num_gpus else f"{cores} cores"
    text = f"It asks for {asked} devices; there are {there}"
    if 0 < num_gpus < asked:
        which = "pipelining.num_stages, num_replicas or num_shards"
        yield _fails(f"{text}. Set {which}, or --device=cpu.")
    elif not num_gpus and cores < asked:
        yield _slow_if(True, f"{text} to share, so there is no speed-up.")
    else:
        yield _ok(f"{text}.")
    if (needed := experiment.num_accelerators) > num_gpus:
        text = f"It is made for {needed} accelerators; there are {num_gpus}"
        yield _slow_if(True, f"{text}. CPU cores take many times as long.")
    yield check_data(experiment)


def check_data(experiment: Experiment) -> CheckResult:
    """Reads a batch of each split."""
    import tensorflow as tf

    from tfgpipe_trainer import batches

    try:
        for split in ("train", "validation"):
            next(iter(experiment.batches(split)))
        experiment.check()
    except (HyperparameterError, ImportError) as error:
        return _fails(" ".join(str(error).split()))
    except tf.errors.OpError as error:
        said = batches.record_error(error) or error.message
        return _fails(" ".join(str(said).split()))
    except StopIteration:
        return _fails(f"Its {split} split is empty.")
    return _ok("A batch of its training and validation data can be read.")
