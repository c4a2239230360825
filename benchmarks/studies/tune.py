"""Settings that `tfgpipe.tune` finds take 0.86 to 1.03 of the best others' time.

`tfgpipe.tune` beside the settings that other benchmarks here are run with.

    python -m benchmarks.studies.tune --workloads=mlp,transformer,decoder,resnet50

On two cores, one thread an operation, with two devices: `tune` finds a setting, which
then trains in turns with those of `benchmarks.peers`, K=2 with M=4 and M=8 in three
schedules, all in one process. Prints the table of trials, and the median and the least
step of each side.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from benchmarks import tables
from benchmarks.peers.turns import TIMED
from benchmarks.worker import Schedule

_K = TypeVar("_K")

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "zero_bubble")
MICROBATCHES = (4, 8)


def measure(name: str, *, rounds: int, trials: int) -> None:
    """Tunes a workload, and prints the result beside the committed settings."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    import tfgpipe

    tfgpipe.make_logical_cpus(2)
    from benchmarks import workloads

    workload = workloads.WORKLOADS[name](**TIMED.get(name, {}))
    batch = tuple(map(tf.constant, workload.make_data()))

    def compiled() -> tuple[Any, list[str]]:
        layers = workload.make_layers()
        model = workload.make_model(layers)
        model.compile(keras.optimizers.SGD(0.01), workload.loss, jit_compile=False)
        return model, workload.stage_ends(layers, 2)

    begin = time.perf_counter()
    tuned = tfgpipe.tune(lambda: compiled()[0], batch, max_trials=trials)
    print(f"{name}, {time.perf_counter() - begin:.0f} s\n{tuned}\n", flush=True)
    sides = {"tuned": stepper(tfgpipe.pipeline(compiled()[0], **tuned.options), batch)}
    for M in MICROBATCHES:
        for schedule in SCHEDULES:
            model, ends = compiled()
            piped = tfgpipe.pipeline(
                model,
                partition=ends,
                num_microbatches=M,
                schedule=schedule,
                remat="none",
            )
            sides[f"{schedule}, M={M}"] = stepper(piped, batch)
    seconds = in_turns(sides, rounds)
    best = min(statistics.median(x) for side, x in seconds.items() if side != "tuned")
    rows = [
        {
            "workload": name,
            "side": side,
            "median ms": 1e3 * statistics.median(each),
            "least ms": 1e3 * min(each),
            "of the best committed": statistics.median(each) / best,
        }
        for side, each in seconds.items()
    ]
    print(tables.draw(rows), flush=True)


def in_turns(
    sides: Mapping[_K, Callable[[], Any]], rounds: int
) -> dict[_K, list[float]]:
    """Returns the seconds of each side in each round."""
    seconds: dict[_K, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, step in sides.items():
            begin = time.perf_counter()
            step()
            seconds[side].append(time.perf_counter() - begin)
    return seconds


def stepper(model: Any, batch: Any) -> Callable[[], Any]:
    """Returns a function that trains a step, after two that are not timed."""
    import tensorflow as tf

    batches = iter(tf.data.Dataset.from_tensors(batch).repeat())
    model.make_train_function()

    def step() -> float:
        return float(model.train_function(batches)["loss"])

    step(), step()
    return step


def main() -> None:
    """Runs each workload in a process of its own."""
    parser = argparse.ArgumentParser(
        description="Compares what `tfgpipe.tune` finds with committed settings."
    )
    parser.add_argument(
        "--workloads",
        type=lambda text: text.split(","),
        default=["mlp", "transformer", "decoder", "resnet50"],
    )
    parser.add_argument("--rounds", type=int, default=8, help="steps of each side")
    parser.add_argument("--trials", type=int, default=12, help="at most")
    flags = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for name in flags.workloads:
        options = {"rounds": flags.rounds, "trials": flags.trials}
        process = context.Process(target=measure, args=(name,), kwargs=options)
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
