"""Start-up of one client over many devices, and laws that extrapolate it.

    python -m benchmarks.scale --json=scale.json
    python -m benchmarks.scale --read=scale.json

One Python process, the client, traces one step for all D x K devices: D replicas of a
pipeline of K stages, M = 2K microbatches a replica, 1F1B, Adam. A stage is one narrow
transformer block on a short sequence, so that the client is measured rather than
arithmetic. The devices are logical CPUs of the client. Each point has its own process.

`build` makes the model and the optimizer's slots, `trace` the graph of the step,
`first step` prepares and runs it, `next step` runs it again; CPU seconds of the
process, because other work may share its cores. `GiB` is the peak of resident memory
after the first step, with the weights, slots and activations of all devices in it.
`GraphDef MiB` is the graph as TensorFlow sends it, which must be less than 2 GiB.

Each quantity gets a law, a + b N + c A + d N D, without negative terms and with the
least relative error: N = D K devices, A = 2 M K D actions. N D allows for work on each
variable that grows with the square of the replicas. The second command repeats only
what follows the measurement: laws, extrapolation, and how far one client goes.
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

# The smallest first: laws are also fitted without the points of most devices.
POINTS = (
    *((1, 4), (1, 8), (2, 4), (4, 4), (1, 16), (8, 4), (4, 8), (2, 16)),
    *((1, 32), (16, 4), (8, 8), (4, 16), (2, 32), (1, 64)),
)
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
    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        result = function()
        seconds[f"{name} s"] = time.process_time() - cpu
        seconds[f"{name} wall s"] = time.perf_counter() - wall
        return result

    m = 2 * k
    strategy = tfgpipe.PipelineStrategy(num_stages=k, num_replicas=d)
    workload = workloads.transformer(num_layers=k, batch_size=m, length=8, d_model=16)

    def build() -> keras.Model:
        with strategy.scope():
            model = tfgpipe.PipelinedModel(
                workload.make_layers(), num_microbatches=m, schedule="1f1b"
            )
            model(keras.Input(workload.batch_shape[1:]))
            model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
            model.optimizer.build(model.trainable_variables)
        return model

    model = timed("build", build)
    data = tuple(
        strategy.experimental_distribute_values_from_function(lambda _, x=x: x)
        for x in map(tf.constant, workload.make_data())
    )

    @tf.function(autograph=False)
    def train(*data: Any) -> Any:
        return strategy.run(lambda *data: model.train_step(data), args=data)

    step = functions.without_grappler(train)
    trace = functions.without_grappler(train.get_concrete_function)
    traced = timed("trace", lambda: trace(*data))
    timed("first", lambda: step(*data))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    timed("next", lambda: step(*data))
    graph = traced.graph.as_graph_def()
    connection.send(
        {
            "D": d,
            "K": k,
            "N": d * k,
            "actions": 2 * m * k * d,
            "nodes": len(graph.node),
            "function nodes": sum(len(f.node_def) for f in graph.library.function),
            "GraphDef MiB": graph.ByteSize() / 2**20,
            **seconds,
            "GiB": peak,
        }
    )


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
    """Returns what a law weighs: 1, N, A and N D."""
    return np.array([1.0, d * k, 4 * d * k * k, d * k * d])


def fit(rows: Sequence[tables.Row], quantity: str) -> np.ndarray:
    """Returns the factors of the terms, none negative, of least relative error."""
    values = np.array([row[quantity] for row in rows])
    matrix = np.array([terms(row["D"], row["K"]) for row in rows]) / values[:, None]
    used = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, used], np.ones(len(rows)), rcond=None)[0]
        if found.min() >= 0:
            break
        del used[int(np.argmin(found * matrix[:, used].max(axis=0)))]
    factors = np.zeros(matrix.shape[1])
    factors[used] = found
    return factors


def error(rows: Sequence[tables.Row], quantity: str, factors: np.ndarray) -> float:
    """Returns the largest relative error of a law, in percent."""
    found = [factors @ terms(row["D"], row["K"]) / row[quantity] for row in rows]
    return 100 * float(np.abs(np.array(found) - 1).max())


def laws(rows: Sequence[tables.Row]) -> tuple[dict[str, np.ndarray], list[tables.Row]]:
    """Returns the law of each quantity, and a table of them with their errors."""
    most = max(row["N"] for row in rows)
    small, large = ([r for r in rows if (r["N"] < most) == want] for want in (1, 0))
    found = {quantity: fit(rows, quantity) for quantity in MEASURED}
    table = [
        {
            "quantity": quantity,
            **dict(zip(("1", "N", "A", "N D"), (f"{f:.3g}" for f in law), strict=True)),
            "error %": error(rows, quantity, law),
            f"N={most} from less, error %": error(
                large, quantity, fit(small, quantity)
            ),
        }
        for quantity, law in found.items()
    ]
    return found, table


def extrapolate(found: dict[str, np.ndarray], d: int, k: int) -> tables.Row:
    """Returns what the laws say of a client of D x K devices."""
    q = {name: float(max(0, law @ terms(d, k))) for name, law in found.items()}
    start = q["build s"] + q["trace s"] + q["first s"]
    return {
        "N": d * k,
        "D x K": f"{d} x {k}",
        "nodes": round(q["nodes"]),
        "GraphDef GiB": q["GraphDef MiB"] / 1024,
        "trace min": q["trace s"] / 60,
        "start-up min": start / 60,
        "GiB": q["GiB"],
        "next s": q["next s"],
    }


def furthest(found: dict[str, np.ndarray], k: int | None, name: str) -> int:
    """Returns the most devices within a limit: with K stages, or one pipeline."""
    n = k or 1
    while n < 10**6:
        d, stages = (n // k, k) if k else (1, n)
        if extrapolate(found, d, stages)[name] > LIMITS[name]:
            break
        n += k or 1
    return n - (k or 1)


def main() -> None:
    """Measures the points, fits the laws and extrapolates them."""
    flags = _parse()
    rows: list[tables.Row] = []
    if flags.read:
        rows = json.loads(Path(flags.read).read_text("utf-8"))
    else:
        for d, k in POINTS:
            row = measure(d, k, flags.limit)
            if row is None:
                print(f"{d} x {k}: longer than {flags.limit} s, left out", flush=True)
                continue
            rows.append(row)
            print(tables.draw([row]), flush=True)
    if flags.json:
        tables.write_json(flags.json, rows)
    found, table = laws(rows)
    far = [
        extrapolate(found, n // k, k)
        for n in DEVICES
        for k in sorted({8, min(64, n), n})
    ]
    ends = [
        {
            "pipeline": f"K={k}" if k else "K=N",
            **{f"N, {name}": furthest(found, k, name) for name in LIMITS},
        }
        for k in (8, 16, 64, None)
    ]
    for each in (rows, table, far, ends):
        print("", tables.draw_markdown(each), sep="\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures one client over many devices."
    )
    parser.add_argument("--limit", type=float, default=180, help="seconds of a point")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    parser.add_argument("--read", metavar="FILE", help="rows to read, not to measure")
    return parser.parse_args()


if __name__ == "__main__":
    main()
