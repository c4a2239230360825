"""On two cores two replicas take 0.66 of a step, two stages 0.69, two shards 1.04.

Step time, graph, memory and traffic of one model on meshes of several shapes.

    python -m benchmarks.studies.mesh --meshes=1,1,1 2,1,1 1,2,1 2,2,1

The transformer of `workloads`, the same batch and M microbatches per replica, on D x K
x T devices, all on the same cores. Each mesh has its own process; they alternate step
by step. `step ms` is the median, `of first` the median of ratios of neighbouring steps;
`nodes` and `functions` count those in the graph of the train step. `weights` and
`slots` (Adam's) are the largest on any device. MiB that a step sends between devices
are read from that graph, by axis of the mesh: between stages, replicas, shards.
With `--memory`, `grows` is how much more memory all devices together have at the peak
of a step than between steps (Linux only).
(Logical CPUs share two cores and one memory: repeated and fine-grained work costs time
here, transfers cost little.)

    python -m benchmarks.studies.mesh --meshes=2,1,1 \
        --shares none slots whole_weights weights

shows what ZeRO saves, and

    python -m benchmarks.studies.mesh --meshes=2,2,1 --shares=weights --memory \
        --width=1024 --batch=8 --length=16 --blocks=16 --stages_per_device=8 \
        --microbatches=2 --schedules looped_bfs looped_bfs+gather

what it saves to gather weights for some passes at a time.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import tables, worker

MIB = 2**20
AXES = ("stages", "replicas", "shards")


class _Process(contextlib.AbstractContextManager["_Process"]):
    """A process with the model of one mesh."""

    def __init__(
        self, mesh: tuple[int, int, int], shares: str, schedule: str, flags: Any
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, mesh, shares, schedule, flags)
        self._process = context.Process(target=_serve, args=arguments)
        self._process.start()
        theirs.close()
        self.sizes: dict[str, Any] = self._connection.recv()

    def step(self) -> float:
        """Trains a step and returns the seconds it took."""
        self._connection.send("step")
        return self._connection.recv()

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join()


def _serve(
    connection: Connection,
    mesh: tuple[int, int, int],
    shares: str,
    schedule: str,
    flags: argparse.Namespace,
) -> None:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    if flags.memory:
        os.environ["TF_ONEDNN_USE_SYSTEM_ALLOCATOR"] = "1"
    import tensorflow as tf

    d, k, t = mesh
    tf.config.threading.set_intra_op_parallelism_threads(1)
    import tfgpipe

    tfgpipe.make_logical_cpus(d * k * t)
    step, sizes = _trainer(mesh, shares, schedule, flags)
    if flags.memory:
        memory = worker.memory_of(step)
        assert isinstance(memory, worker.Memory), memory
        sizes["grows MiB"] = (memory.peak - memory.before) / MIB
    connection.send(sizes)
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        start = time.perf_counter()
        step()
        connection.send(time.perf_counter() - start)


def _trainer(
    mesh: tuple[int, int, int], shares: Any, schedule: str, flags: argparse.Namespace
) -> Any:
    """Returns what trains a step, and what it holds and moves."""
    import keras
    import tensorflow as tf

    import tfgpipe
    from benchmarks import workloads
    from tfgpipe._compat import functions

    d, k, t = mesh
    v, m = flags.stages_per_device, flags.microbatches
    size = k * t
    devices = [f"CPU:{i}" for i in range(d * size)]
    strategy = tfgpipe.PipelineStrategy(
        num_stages=k * v,
        num_replicas=d,
        num_shards=t,
        devices=[x for i in range(d) for x in v * devices[i * size : (i + 1) * size]],
        shard_replicas=shares,
    )
    workload = workloads.transformer(
        num_layers=flags.blocks,
        batch_size=flags.batch,
        length=flags.length,
        d_model=flags.width,
    )
    with strategy.scope():
        layers = workload.make_layers()
        if t > 1:
            layers = [workloads.ShardedEncoderBlock(num_shards=t) for _ in layers]
        model = tfgpipe.PipelinedModel(layers, num_microbatches=m, schedule=schedule)
        model(keras.Input(workload.batch_shape[1:]))
        model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    halves = [tf.split(tf.constant(x), d) for x in workload.make_data()]
    data = tuple(
        strategy.experimental_distribute_values_from_function(
            lambda context, x=x: x[context.replica_id_in_sync_group]
        )
        for x in halves
    )

    @tf.function(autograph=False)
    def train(*data: Any) -> Any:
        return strategy.run(lambda *data: model.train_step(data), args=data)

    traced = functions.without_grappler(train.get_concrete_function)(*data)
    step = functions.without_grappler(train)
    graph = traced.graph
    held = {
        name: _largest(strategy, variables)
        for name, variables in (
            ("weights", model.trainable_variables),
            ("slots", [v for v in model.optimizer.variables if len(v.shape)]),
        )
    }
    moved = traffic(graph, strategy.mesh)
    sizes = {
        "nodes": len(graph.get_operations()),
        "functions": len(graph.as_graph_def().library.function),
        "weights MiB": held["weights"] / MIB,
        "slots MiB": held["slots"] / MIB,
        **{f"{axis} MiB": moved[axis] / MIB for axis in AXES},
    }
    return lambda: step(*data), sizes


def _largest(strategy: Any, variables: Any) -> int:
    """Returns the bytes of variables on the device that has most."""
    held: collections.Counter[str] = collections.Counter()
    for variable in variables:
        for copy in strategy.copies(variable.value):
            held[copy.device] += copy.shape.num_elements() * copy.dtype.size
    return max(held.values())


def traffic(graph: Any, mesh: Any) -> collections.Counter[str]:
    """Returns the bytes that cross between devices, by axis of the mesh.

    A tensor that several operations of a device use crosses once. What goes to another
    replica counts as communication of replicas even if it changes stage as well.

    Args:
        graph: The graph of a step, with shapes that are known.
        mesh: The devices.
    """
    from tfgpipe._util import num_bytes
    from tfgpipe.devices import colocation

    places = {
        device: (r, s, t)
        for r in range(mesh.num_replicas)
        for s in range(mesh.num_stages)
        for t, device in enumerate(mesh.shard_devices(r, s))
    }
    moved: collections.Counter[str] = collections.Counter()
    seen = set()
    find = colocation.device_finder()
    for operation in graph.get_operations():
        there = operation.device
        for tensor in operation.inputs:
            here = find(tensor)
            if here == there or not {here, there} <= set(places):
                continue
            key = (tensor.name, there)
            if key in seen:
                continue
            seen.add(key)
            (r, s, _), (q, u, _) = places[here], places[there]
            axis = "replicas" if r != q else "stages" if s != u else "shards"
            moved[axis] += num_bytes(tensor)
    return moved


def main() -> None:
    """Measures each mesh."""
    flags = _parse()
    sides = list(itertools.product(flags.meshes, flags.shares, flags.schedules))
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(_Process(mesh, shares, schedule, flags))
            for mesh, shares, schedule in sides
        ]
        turns = [
            [process.step() for process in processes]
            for _ in range(flags.warmup + flags.steps)
        ][flags.warmup :]
    rows = [
        {
            "D,K,T": ",".join(map(str, mesh)),
            "shares": shares,
            "schedule": schedule,
            "step ms": 1e3 * statistics.median(turn[i] for turn in turns),
            "of first": statistics.median(turn[i] / turn[0] for turn in turns),
            **process.sizes,
        }
        for i, ((mesh, shares, schedule), process) in enumerate(
            zip(sides, processes, strict=True)
        )
    ]
    print(tables.draw(rows))
    if flags.json:
        tables.write_json(flags.json, rows)


def _mesh(text: str) -> tuple[int, int, int]:
    d, k, t = map(int, text.split(","))
    return d, k, t


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures one model on many meshes.")
    parser.add_argument(
        "--meshes",
        type=_mesh,
        nargs="+",
        default=[(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 2, 2)],
        help="D,K,T: replicas, stages, shards; the first is the baseline",
    )
    parser.add_argument("--shares", nargs="+", default=["none"])
    parser.add_argument("--schedules", nargs="+", default=["1f1b"])
    parser.add_argument("--stages_per_device", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--microbatches", type=int, default=4, help="M, of a replica")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
