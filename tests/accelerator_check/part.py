"""The process of one part: `python -m tests.accelerator_check.part NAME ...`."""

from __future__ import annotations

import argparse
import functools
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import tensorflow as tf

from tests.accelerator_check import (
    devices,
    identity,
    measurements,
    placement,
    prediction,
    training,
    variants,
)
from tests.accelerator_check.devices import Machine
from tests.accelerator_check.report import PARTS, NotRunError, Recorder


def machine_part(recorder: Recorder, machine: Machine, folder: Path) -> None:
    """Says what the machine is."""
    machine.write(folder)
    memory = machine.memory_bytes / 2**30
    build = tf.sysconfig.get_build_info()
    about = {
        "devices": f"{len(machine.devices)} x {machine.kind} {machine.name}".strip(),
        "physical devices": machine.num_physical,
        "memory of a GPU": f"{memory:.1f} GiB" if memory else "not known",
        "platform of the planner": machine.platform,
        "sizes": "quick" if machine.quick else "full",
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "Python": platform.python_version(),
        "CUDA, cuDNN of TensorFlow": ", ".join(
            str(build.get(f"{name}_version")) for name in ("cuda", "cudnn")
        ),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
    }
    for what, value in about.items():
        recorder.row("Machine", what=what, value=value)
    for i, gpu in enumerate(tf.config.list_physical_devices("GPU")):
        details = tf.config.experimental.get_device_details(gpu)
        recorder.row(
            "GPUs",
            index=i,
            name=details.get("device_name"),
            **{"compute capability": details.get("compute_capability")},
        )
    query = "index,name,memory.total,memory.used,driver_version,pcie.link.gen.current"
    for line in devices.nvidia_smi(query):
        cells = dict(zip(query.split(","), line.split(", "), strict=False))
        recorder.row("nvidia-smi", **cells)
    if machine.is_divided and machine.kind == "GPU":
        recorder.text("One GPU, divided: times say nothing of several GPUs.")


Body = Callable[[Recorder, Machine, Path], None]
BODIES: dict[str, Body] = {
    "machine": machine_part,
    "identity": lambda r, m, _: identity.identity_part(r, m),
    "prediction": prediction.prediction_part,
    "placement": placement.placement_part,
    "memory": measurements.memory_part,
    "overlap": measurements.overlap_part,
    "replicas": lambda r, m, _: variants.replicas_part(r, m),
    "xla": lambda r, m, _: variants.xla_part(r, m),
    "training": training.training_part,
}
# These leave the devices to processes of their own, or see none.
_ELSEWHERE = ("prediction", "training")


def _run(recorder: Recorder, *, name: str, folder: Path, quick: bool) -> None:
    machine = devices.read_machine(folder)
    if name not in _ELSEWHERE:
        machine = devices.start(quick=quick)
    if machine is None:
        raise NotRunError("the machine is not known: see that part")
    BODIES[name](recorder, machine, folder)


def main() -> None:
    """Runs a part and writes what it finds into a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[part.name for part in PARTS])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    flags = parser.parse_args()
    body = functools.partial(
        _run, name=flags.name, folder=flags.folder, quick=flags.quick
    )
    path = flags.folder / f"{flags.name}.jsonl"
    with path.open("a", encoding="utf-8") as stream:
        Recorder(stream, seconds=flags.seconds).run(body)
    # Not by Python's end, at which a device that hangs would hold the process.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
