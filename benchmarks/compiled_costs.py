"""What compilers make of a stage, beside what the planner says of it.

    python -m benchmarks.compiled_costs --platforms=h100-80g,tpu-v5e

A pipeline of three stages, of which the middle one is a block of a transformer, or a
residual one of convolutions, is compiled with `tfgpipe.dry_run`; nothing is run.
Columns, of a microbatch and in MiB:

- `accessed`: bytes that the kernels of the pass read and write, by XLA's count;
  `products`: of these, operands and results of matrix products and convolutions, and
  the sum of gradients; `unfused`: what the other operations would read and write
  without fusion, the planner's traffic;
- `left`: (accessed - products) / unfused, which the planner's `fusion_factor` is;
- `temp`: what the backward needs beside arguments and sums of gradients;
  `planned`: the planner's `workspace`, and with `remat="stage"` `recomputed`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks import tables

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

MIB = 2**20
WIDTH = 1024
POLICIES = ("float32", "mixed_bfloat16")
REMATS = ("none", "stage")


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--platforms",
        type=lambda text: text.split(","),
        default=["h100-80g", "tpu-v5e"],
        metavar="NAME,...",
    )
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=[*BLOCKS])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--remats", nargs="+", choices=REMATS, default=REMATS)
    flags = parser.parse_args()
    rows = []
    context = multiprocessing.get_context("spawn")
    tasks = [
        (platform, block, policy, remat)
        for platform in flags.platforms
        for block in flags.blocks
        for policy in flags.policies
        for remat in flags.remats
    ]
    for task in tasks:
        with context.Pool(1) as pool:
            (row,) = pool.starmap(measure, [task])
        print(json.dumps(row), flush=True)
        rows.append(row)
    print(tables.draw(rows))


def measure(platform: str, block: str, policy: str, remat: str) -> tables.Row:
    """Returns the row of a block's stage."""
    import keras
    import tensorflow as tf

    import tfgpipe
    from tfgpipe import planner

    tfgpipe.make_logical_cpus(3)
    keras.config.set_dtype_policy(policy)
    make, shape, rows = BLOCKS[block]
    inputs = keras.Input(shape)
    alone = keras.Model(inputs, make(inputs))
    workload = planner.read(alone)
    x = make(keras.layers.LayerNormalization()(inputs))
    pipelined = keras.Model(inputs, keras.layers.LayerNormalization()(x))
    num = len(workload.layers)
    model = tfgpipe.PipelinedModel(
        pipelined,
        num_stages=3,
        num_microbatches=2,
        balance=[1, num, 1],
        remat=remat,
        schedule="gpipe",
    )
    model.compile("sgd", "mse")
    spec = tf.TensorSpec([2 * rows, *shape])
    report = tfgpipe.dry_run(model, batch=(spec, spec), platform=platform)
    compiled = {x.name: x.compiled for x in report.functions if x.device == 1}
    return {k: vars(v) for k, v in compiled.items()}


def _transformer(x: Any) -> Any:
    from benchmarks import workloads

    return workloads.EncoderBlock(num_heads=WIDTH // 64)(x)


def _convolution(x: Any) -> Any:
    """Returns what a bottleneck of ResNet-50 makes, as Keras has it."""
    from keras import layers

    y = x
    for filters, size in ((WIDTH // 4, 1), (WIDTH // 4, 3), (WIDTH, 1)):
        y = layers.Conv2D(filters, size, padding="same", use_bias=False)(y)
        y = layers.BatchNormalization()(y)
        if filters < WIDTH:
            y = layers.Activation("relu")(y)
    return layers.Activation("relu")(layers.Add()([x, y]))


# What makes a block, the shape of an example, and the examples of a microbatch.
BLOCKS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], int]] = {
    "transformer": (_transformer, (512, WIDTH), 4),
    "convolution": (_convolution, (14, 14, WIDTH), 32),
}

if __name__ == "__main__":
    main()
