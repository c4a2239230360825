"""A client drives about 640 devices, if it may take ten minutes to start.

Start-up of one client over many devices, and laws that extrapolate it.

    python -m benchmarks.studies.scale --json=scale.json
    python -m benchmarks.studies.scale --read=scale.json

One Python process, the client, traces one step for all N = D x K devices: D replicas of
a pipeline of K stages, M = 2K microbatches a replica, 1F1B, Adam. A stage is one narrow
transformer block on a short sequence, so that the client is measured rather than
arithmetic. The devices are logical CPUs of the client. Each point has its own process.

`build` makes the model and the optimizer's slots, `trace` the graph of the step,
`first` prepares and runs it, `next` runs it again: CPU seconds of the process, because
other work may share its cores; `wall s` is the elapsed time of the first three. `GiB`
is the peak of resident memory up to the first step, with the weights, slots and
activations of all devices in it. `GraphDef MiB` is the step's graph as TensorFlow sends
it, which must be less than 2 GiB.

Each quantity gets a law, a + b N + c N' + d A, with no negative factor and of least
relative error, where A = 2 M K D is the number of actions, and N' is N where replicas
sum gradients, D > 1, else 0. The last point, of 128 devices, takes no part in that: it
shows how well laws extrapolate. The second command repeats what follows the
measurement: the laws, the extrapolation, and how far one client goes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tables

POINTS = (
    *((1, 4), (1, 8), (2, 4), (4, 4), (1, 16), (8, 4), (4, 8), (2, 16)),
    *((1, 32), (32, 2), (16, 4), (8, 8), (4, 16), (2, 32), (1, 64), (16, 8)),
)
MOST_FITTED = 64
DEVICES = (8, 64, 512, 4096)
MEASURED = ("nodes", "GraphDef MiB", "build s", "trace s", "first s", "next s", "GiB")
# What one client should not exceed; the graph's limit is that of protobuf.
LIMITS = {"start-up min": 10.0, "GiB": 16.0, "GraphDef GiB": 2.0}


def _serve(connection: Connection, d: int, k: int) -> None:
    """Runs in the process of one point: sends its row."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import keras
    import tensorflow as tf

    import tfgpipe
    from benchmarks import workloads
    from tfgpipe._compat import functions

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tfgpipe.make_logical_cpus(d * k)
    m = 2 * k
    strategy = tfgpipe.PipelineStrategy(num_stages=k, num_replicas=d)
    workload = workloads.transformer(num_layers=k, batch_size=m, length=8, d_model=16)
    seconds: dict[str, float] = {"wall s": 0.0}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        result = function()
        seconds[name] = time.process_time() - cpu
        seconds["wall s"] += time.perf_counter() - wall
        return result

    def build() -> keras.Model:
        with strategy.scope():
            model = tfgpipe.PipelinedModel(
                workload.make_layers(), num_microbatches=m, schedule="1f1b"
            )
            model(keras.Input(workload.batch_shape[1:]))
            model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
            model.optimizer.build(model.trainable_variables)
        return model

    model = timed("build s", build)
    data = tuple(
        strategy.experimental_distribute_values_from_function(lambda _, x=x: x)
        for x in map(tf.constant, workload.make_data())
    )

    @tf.function(autograph=False)
    def train(*data: Any) -> Any:
        return strategy.run(lambda *data: model.train_step(data), args=data)

    step = functions.without_grappler(train)
    trace = functions.without_grappler(train.get_concrete_function)
    traced = timed("trace s", lambda: trace(*data))
    timed("first s", lambda: step(*data))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    row = {"D": d, "K": k, "N": d * k, "A": 2 * m * k * d, **seconds, "GiB": peak}
    timed("next s", lambda: step(*data))
    graph = traced.graph.as_graph_def()
    sizes = {"nodes": len(graph.node), "GraphDef MiB": graph.ByteSize() / 2**20}
    connection.send({**row, "next s": seconds["next s"], **sizes})


def measure(d: int, k: int, limit: float) -> tables.Row | None:
    """Returns the row of a point, or None if it takes longer than the limit."""
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, d, k))
    process.start()
    theirs.close()
    row = connection.recv() if connection.poll(limit) else None
    process.kill()
    process.join()
    return row


def terms(d: float, k: float) -> np.ndarray:
    """Returns what a law weighs: 1, N, N' and A."""
    return np.array([1.0, d * k, d * k * (d > 1), 4 * d * k * k])


def fit(rows: Sequence[tables.Row], quantity: str) -> np.ndarray:
    """Returns the factors of the terms, none negative, of least relative error."""
    values = np.array([row[quantity] for row in rows])
    matrix = np.array([terms(row["D"], row["K"]) for row in rows]) / values[:, None]
    used, ones = list(range(matrix.shape[1])), np.ones(len(rows))
    while True:
        factors = np.zeros(matrix.shape[1])
        factors[used] = np.linalg.lstsq(matrix[:, used], ones, rcond=None)[0]
        if factors.min() >= 0:
            return factors
        # The term that takes most from any value goes first.
        used.remove(int(np.argmin(factors * matrix.max(axis=0))))


def error(rows: Sequence[tables.Row], quantity: str, law: np.ndarray) -> float:
    """Returns the largest relative error of a law, in percent."""
    found = [law @ terms(row["D"], row["K"]) / row[quantity] for row in rows]
    return 100 * float(np.abs(np.array(found) - 1).max())


def extrapolate(laws: dict[str, np.ndarray], d: int, k: int) -> tables.Row:
    """Returns what the laws say of a client of D x K devices."""
    q = {name: float(law @ terms(d, k)) for name, law in laws.items()}
    return {
        "N": d * k,
        "D x K": f"{d} x {k}",
        "nodes": round(q["nodes"]),
        "GraphDef GiB": q["GraphDef MiB"] / 1024,
        "trace min": q["trace s"] / 60,
        "start-up min": (q["build s"] + q["trace s"] + q["first s"]) / 60,
        "GiB": q["GiB"],
        "next s": q["next s"],
    }


def furthest(laws: dict[str, np.ndarray], k: int | None, name: str) -> int:
    """Returns the most devices within a limit: D pipelines of K stages, or one."""
    count = 1
    while count < 10**5:
        row = extrapolate(laws, count, k) if k else extrapolate(laws, 1, count)
        if row[name] > LIMITS[name]:
            break
        count += 1
    return (count - 1) * (k or 1)


def main() -> None:
    """Measures the points, fits the laws and extrapolates them."""
    parser = argparse.ArgumentParser(description="Measures a client of many devices.")
    parser.add_argument("--limit", type=float, default=180, help="seconds of a point")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    parser.add_argument("--read", metavar="FILE", help="rows to read, not to measure")
    flags = parser.parse_args()
    rows = json.loads(Path(flags.read).read_text("utf-8")) if flags.read else []
    for d, k in () if flags.read else POINTS:
        row = measure(d, k, flags.limit)
        print(tables.draw([row]) if row else f"{d} x {k}: too long", flush=True)
        rows += [row] if row else []
    if flags.json:
        tables.write_json(flags.json, rows)
    fitted = [row for row in rows if row["N"] <= MOST_FITTED]
    others = [row for row in rows if row["N"] > MOST_FITTED]
    laws = {quantity: fit(fitted, quantity) for quantity in MEASURED}
    errors = [
        {
            "quantity": name,
            **{t: f"{f:.3g}" for t, f in zip(("1", "N", "N'", "A"), law, strict=True)},
            "error %": error(fitted, name, law),
            "beyond %": error(others, name, law) if others else "",
        }
        for name, law in laws.items()
    ]
    shapes = [(n // k, k) for n in DEVICES for k in sorted({8, min(64, n), n})]
    far = [extrapolate(laws, d, k) for d, k in shapes]
    ends = [
        {"K": k or "N", **{f"N: {name}": furthest(laws, k, name) for name in LIMITS}}
        for k in (8, 16, 64, None)
    ]
    for table in (rows, errors, far, ends):
        print("", tables.draw_markdown(table), sep="\n")


if __name__ == "__main__":
    main()
