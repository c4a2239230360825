"""How a peer is told to train a step, and tells what it took.

A peer is a module that the Python of another environment runs, from the root of this
repository:

    PYTHON -m benchmarks.peers.jax_pipeline TASK < steps

`TASK` is a `Task` in JSON. The peer prints a line of JSON once it is ready, and one for
each line it reads: the seconds and CPU seconds of a step, and the loss before its
update. Here is all that peers have in common; it needs nothing but numpy.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np

LEARNING_RATE = 0.01
# Of Keras' LayerNormalization.
EPSILON = 1e-3

Weights = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of a workload, as Keras has it.

    Attributes:
        kind: The name of its class.
        config: What its `get_config` returns.
        weights: By their paths inside the layer, with dots. Kernels have inputs first,
            those of attention have the heads apart.
    """

    kind: str
    config: dict[str, Any]
    weights: Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """What all sides start from.

    Attributes:
        x: The input.
        y: The target: numbers of the output's shape, or classes.
        layers: In order.
        layers_per_stage: By the number of stages, where they are not equal.
    """

    x: np.ndarray
    y: np.ndarray
    layers: list[Layer]
    layers_per_stage: Mapping[int, Sequence[int]]

    def spans(self, num_stages: int) -> list[slice]:
        """Returns which layers each stage has."""
        counts = layer_counts(len(self.layers), num_stages, self.layers_per_stage)
        ends = itertools.accumulate(counts)
        return [slice(end - n, end) for end, n in zip(ends, counts, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a peer trains, and how.

    Attributes:
        workload: Its name.
        given: The file of a `Given`, see `write`.
        num_stages: K, with a core each while there are cores; 1 for the plain model.
        num_processes: K, or 1 for all stages in one process.
        num_microbatches: M.
        schedule: The order of the actions, or "plain".
        remat: What is rematerialised.
        port: One that is free, for the processes to find each other.
        compiled: Whether the library's compiler takes the whole model, or each stage.
    """

    workload: str
    given: str
    num_stages: int
    num_processes: int
    num_microbatches: int
    schedule: str
    remat: Literal["none", "stage"]
    port: int
    compiled: bool = False


def layer_counts(
    num_layers: int, num_stages: int, layers_per_stage: Mapping[int, Sequence[int]]
) -> Sequence[int]:
    """Returns how many layers each stage has: the first have one more of a remainder.

    Args:
        num_layers: Of all stages.
        num_stages: K.
        layers_per_stage: By the number of stages, where they are given.
    """
    size, more = divmod(num_layers, num_stages)
    equal = [size + (k < more) for k in range(num_stages)]
    return layers_per_stage.get(num_stages, equal)


# Trains a step and returns its loss, or None where the last stage is elsewhere.
StepFn = Callable[[], float | None]
# Takes a task and the number of the process.
MakeStep = Callable[[Task, int], StepFn]


def write(path: Path, given: Given) -> None:
    """Writes a file that `read` reads."""
    model = {
        "layers": [(layer.kind, layer.config) for layer in given.layers],
        "layers_per_stage": given.layers_per_stage,
    }
    arrays: dict[str, Any] = {"x": given.x, "y": given.y, "model": json.dumps(model)}
    for index, layer in enumerate(given.layers):
        for name, weight in layer.weights.items():
            arrays[f"{index}/{name}"] = weight
    np.savez(path, **arrays)


def read(task: Task) -> Given:
    """Returns what `write` wrote to the file of a task."""
    with np.load(task.given) as arrays:
        model = json.loads(arrays["model"].item())
        layers = [
            Layer(kind=kind, config=config, weights={})
            for kind, config in model["layers"]
        ]
        for key in arrays.files:
            index, slash, name = key.partition("/")
            if slash:
                layers[int(index)].weights[name] = arrays[key]
        return Given(
            x=arrays["x"],
            y=arrays["y"],
            layers=layers,
            layers_per_stage={
                int(K): counts for K, counts in model["layers_per_stage"].items()
            },
        )


def run(make_step: MakeStep, **versions: str) -> None:
    """Starts the processes of a task, and has them train a step for each line read.

    Args:
        make_step: A function of the peer's module.
        **versions: Packages with their versions.
    """
    task = Task(**json.loads(sys.argv[1]))
    # Whatever asks how many threads to start.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))[: task.num_stages]
    ours, processes = [], []
    for rank in range(task.num_processes):
        connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(make_step, task, rank, theirs))
        # Inherited, so that no thread is ever elsewhere.
        shared = cores[rank % len(cores) :: min(task.num_processes, len(cores))]
        os.sched_setaffinity(0, shared)
        process.start()
        theirs.close()
        ours.append(connection)
        processes.append(process)
    for connection in ours:
        connection.recv()
    _say(versions)
    for _ in sys.stdin:
        start = time.perf_counter()
        for connection in ours:
            connection.send("step")
        results = [connection.recv() for connection in ours]
        seconds = time.perf_counter() - start
        (loss,) = [loss for loss, _ in results if loss is not None]
        cpu_seconds = sum(cpu_seconds for _, cpu_seconds in results)
        _say({"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss})
    for connection in ours:
        connection.close()
    for process in processes:
        process.join()


def _serve(make_step: MakeStep, task: Task, rank: int, connection: Connection) -> None:
    """Trains a step whenever told to, until the pipe closes."""
    # Gloo reports its connections on standard output, which is for results.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    step = make_step(task, rank)
    connection.send(None)
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        start = time.process_time()
        loss = step()
        connection.send((loss, time.process_time() - start))


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)
