"""The planner predicts steps on two cores within 15% of what they take.

Steps on this machine, predicted by the planner and then measured.

    python -m benchmarks.studies.planner

What a core can do is measured first: how fast it multiplies matrices of the shapes
that a workload multiplies, and how fast it goes through the elements of arrays as large
as its widest activation. As many cores as will be used do that at the same time. From
these and the layers, never from a step, the planner predicts the step; then it is
measured, as in `benchmarks.pipeline`: one core a stage, one thread, `--steps` steps
after untimed ones. That is done `--rounds` times, and figures are medians: a machine
that others share is not equally fast in every minute.

Results are freed as soon as they are made, as most are in a step: memory that the
allocator has to ask of the system anew takes four times as long to write.

Columns: milliseconds predicted and measured; how far the prediction is off; the rates
of both passes' products and of memory that it stands on; `stolen`, how many cores other
work on the machine took meanwhile. With more than 0.1, measure again when it is quiet.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import tables
from benchmarks.worker import Schedule, Side, Worker
from tfgpipe import remat as remat_lib
from tfgpipe import schedules
from tfgpipe.planner import TABLE, Device, Estimate, ParallelConfig, PlanRequest

if TYPE_CHECKING:
    from tfgpipe.planner import Workload

Shape = tuple[int, ...]
# Workload, K, M, schedule, remat.
CONFIGURATIONS: tuple[tuple[str, int, int, Schedule, remat_lib.Name], ...] = (
    ("mlp", 1, 1, "gpipe", "none"),
    ("mlp", 2, 4, "1f1b", "none"),
    ("mlp", 2, 8, "gpipe", "stage"),
    ("transformer", 1, 1, "gpipe", "none"),
    ("transformer", 2, 8, "1f1b", "none"),
    ("transformer", 2, 4, "gpipe", "stage"),
)


@dataclasses.dataclass(frozen=True)
class Product:
    """Matrix products of a layer's forward, `[b, m, k] x [b, k, n]` for each row.

    Attributes:
        number: How many there are.
        batch: b; 1 where the second operand is a weight.
        m: Rows of the result; with a weight, all rows together are.
        k: What is summed.
        n: Columns of the result.
        has_weight: Whether the second operand is a weight.
    """

    number: int
    batch: int
    m: int
    k: int
    n: int
    has_weight: bool = True

    @property
    def flops(self) -> float:
        """FLOPs of one, for a row."""
        return 2.0 * self.batch * self.m * self.k * self.n


PRODUCTS: dict[str, tuple[Product, ...]] = {
    "mlp": (Product(1, 1, 1, 1024, 1024),),
    "transformer": (
        Product(4, 1, 128, 256, 256),
        Product(1, 1, 128, 256, 1024),
        Product(1, 1, 128, 1024, 256),
        Product(1, 4, 128, 64, 128, has_weight=False),
        Product(1, 4, 128, 128, 64, has_weight=False),
    ),
}
# Floats of a row in a workload's widest activation.
WIDEST = {"mlp": 1024, "transformer": 128 * 1024}
BATCH_SIZES = {"mlp": 512, "transformer": 32}
# Floats that are certainly in no cache.
LARGE = 2**23
REPEATS = 15
# Seconds in which a core is measured. One that fails does not keep the others waiting.
TIMEOUT = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What one core was measured to do.

    Attributes:
        forward: FLOP/s of a forward's products.
        backward: FLOP/s of a backward's.
        bandwidth: Bytes a second, read or written, of additions and exponentials.
    """

    forward: float
    backward: float
    bandwidth: float


def calibrate(workload: str, num_microbatches: int, cores: Sequence[int]) -> Rates:
    """Returns what a core can do while all of `cores` do the same.

    Args:
        workload: A name in `PRODUCTS`.
        num_microbatches: M, which says how large a microbatch is.
        cores: The cores.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(cores))
    results = context.Queue()
    processes = [
        context.Process(
            target=_measure, args=(workload, num_microbatches, core, barrier, results)
        )
        for core in cores
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=TIMEOUT) for _ in processes]
    for process in processes:
        process.join()
    names = [field.name for field in dataclasses.fields(Rates)]
    return Rates(
        **{
            name: statistics.mean(getattr(rates, name) for rates in found)
            for name in names
        }
    )


def _measure(
    workload: str, num_microbatches: int, core: int, barrier: Any, results: Any
) -> None:
    """Runs in a process of its own: measures on one core."""
    os.sched_setaffinity(0, [core])
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    batch_size = BATCH_SIZES[workload]
    rows = batch_size // num_microbatches
    seconds = {"forward": 0.0, "backward": 0.0}
    flops = {"forward": 0.0, "backward": 0.0}
    for product in PRODUCTS[workload]:
        for which, some in _passes(product, rows, batch_size).items():
            for operation, count, shapes in some:
                taken = _seconds(operation, shapes, barrier)
                seconds[which] += product.number * taken
                flops[which] += product.number * count * product.flops
    shape = (rows, WIDEST[workload])
    added = _seconds(tf.add, (shape, shape), barrier)
    raised = _seconds(tf.exp, (shape,), barrier)
    results.put(
        Rates(
            forward=flops["forward"] / seconds["forward"],
            backward=flops["backward"] / seconds["backward"],
            bandwidth=(3 + 2) * 4 * math.prod(shape) / (added + raised),
        )
    )


def _passes(
    product: Product, rows: int, batch_size: int
) -> dict[str, list[tuple[Callable[..., Any], int, list[Shape]]]]:
    """Returns, for each pass, what it runs, on how many rows, and its operands' shapes.

    Where gradients of weights are put off (`tfgpipe.sums`), that is the whole batch.
    """
    import tensorflow as tf

    from tfgpipe.graph import passes

    m, k, n = product.m, product.k, product.n
    transposed = {"transpose_b": True}, {"transpose_a": True}
    if not product.has_weight:
        left, right, result = (
            (rows, product.batch, *shape) for shape in ((m, k), (k, n), (m, n))
        )
        of_left, of_right = (functools.partial(tf.matmul, **t) for t in transposed)
        return {
            "forward": [(tf.matmul, rows, [left, right])],
            "backward": [
                (of_left, rows, [result, right]),
                (of_right, rows, [left, result]),
            ],
        }
    together = batch_size if batch_size * m * (k + n) <= k * n else rows
    of_input, of_weight = (functools.partial(passes.multiply, **t) for t in transposed)
    return {
        "forward": [(passes.multiply, rows, [(rows * m, k), (k, n)])],
        "backward": [
            (of_input, rows, [(rows * m, n), (k, n)]),
            (of_weight, together, [(together * m, k), (together * m, n)]),
        ],
    }


def _seconds(
    operation: Callable[..., Any], shapes: Sequence[Shape], barrier: Any
) -> float:
    """Returns the median time of an operation, all cores beginning at a time."""
    import tensorflow as tf

    # Operands that wait in no cache, as those of a model do not.
    copies = min(max(2, LARGE // max(math.prod(shape) for shape in shapes)), 16)
    operands = [[tf.random.normal(shape) for shape in shapes] for _ in range(copies)]

    @tf.function(autograph=False)
    def run() -> Any:
        results = (operation(*some) for some in operands)
        return tf.add_n([tf.reshape(result, [-1])[0] for result in results])

    run()
    taken = []
    for _ in range(REPEATS):
        barrier.wait(TIMEOUT)
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) / copies


def device(rates: Rates, rows: float) -> Device:
    """Returns a core as it was measured."""
    return dataclasses.replace(
        TABLE["cpu-core"],
        name="this core",
        bandwidth=rates.bandwidth,
        rates={
            "forward": ((rows, rates.forward),),
            "backward": ((rows, rates.backward),),
        },
    )


def read(name: str) -> Workload:
    """Returns a workload of `benchmarks.workloads` as the planner sees it."""
    import keras

    from benchmarks import workloads
    from tfgpipe import planner

    given = workloads.WORKLOADS[name]()
    return planner.read(
        lambda: keras.Sequential(
            [keras.Input(given.batch_shape[1:]), *given.make_layers()]
        ),
        name=name,
    )


def predict(
    workload: Workload, rates: Rates, side: Side, *, batch_size: int
) -> Estimate:
    """Returns what the planner says of a side of a comparison."""
    K, M = side.num_stages or 1, side.num_microbatches
    request = PlanRequest(
        workload,
        device=device(rates, batch_size / M),
        num_devices=K,
        batch_size=batch_size,
        num_slots=0,
    )
    return request.estimate(
        ParallelConfig(
            num_replicas=1,
            num_devices=K,
            num_shards=1,
            num_microbatches=M,
            schedule=schedules.find(side.schedule or "gpipe"),
            remat=remat_lib.find(side.remat),
        )
    )


def main() -> None:
    """Predicts and measures all configurations."""
    parser = argparse.ArgumentParser(
        description="Predicted steps beside measured ones."
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--workloads", nargs="+", choices=list(BATCH_SIZES), default=list(BATCH_SIZES)
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    flags = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    known: dict[str, Workload] = {}
    rows = []
    for name, K, M, schedule, remat in CONFIGURATIONS:
        if name not in flags.workloads:
            continue
        if name not in known:
            known[name] = read(name)
        side = Side(
            workload=name,
            num_stages=K,
            num_microbatches=M,
            schedule=schedule,
            remat=remat,
            executor="serial",
            cores=tuple(cores[:K]),
        )
        rates, predicted, steps = [], [], []
        with Worker(side) as worker:
            worker.step()
            for _ in range(flags.rounds):
                rates.append(calibrate(name, M, side.cores))
                found = predict(
                    known[name], rates[-1], side, batch_size=BATCH_SIZES[name]
                )
                predicted.append(found.time.total)
                worker.step()
                steps += [worker.step() for _ in range(flags.steps)]
        seconds = statistics.median(step.seconds for step in steps)
        expected = statistics.median(predicted)
        rows.append(
            {
                "workload": name,
                "K": K,
                "M": M,
                "schedule": schedule,
                "remat": remat,
                "predicted ms": 1e3 * expected,
                "measured ms": 1e3 * seconds,
                "error": f"{100 * (expected / seconds - 1):+.1f}%",
                "GFLOP/s": statistics.median(r.forward for r in rates) / 1e9,
                "backward": statistics.median(r.backward for r in rates) / 1e9,
                "GB/s": statistics.median(r.bandwidth for r in rates) / 1e9,
                "stolen": statistics.mean(s.stolen_seconds / s.seconds for s in steps),
            }
        )
        print(tables.draw(rows[-1:]), flush=True)
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


if __name__ == "__main__":
    main()
