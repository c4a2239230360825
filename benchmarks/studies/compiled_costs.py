"""Compilers leave 0.26 of the planner's traffic on an H100, and 0.12 on a TPU v5e.

What compilers make of a stage, beside what the planner says of it.

    python -m benchmarks.studies.compiled_costs --platforms=h100-80g,tpu-v5e

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
import json
import multiprocessing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks import tables

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfgpipe.remat import Name as Remat

MIB = 2**20
WIDTH = 1024
POLICIES = ("float32", "mixed_bfloat16")
REMATS: tuple[Remat, ...] = ("none", "stage")
PRODUCTS = frozenset(
    [
        *("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"),
        *("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"),
    ]
)


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--platforms",
        type=lambda text: text.split(","),
        default=["h100-80g", "tpu-v5e"],
        metavar="NAME,...",
    )
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=[*BLOCKS])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--remats", nargs="+", choices=REMATS, default=REMATS)
    parser.add_argument("--numbers", nargs="+", type=int, default=[1], metavar="N")
    flags = parser.parse_args()
    rows: list[tables.Row] = []
    context = multiprocessing.get_context("spawn")
    tasks = [
        (platform, block, policy, remat, number)
        for platform in flags.platforms
        for block in flags.blocks
        for policy in flags.policies
        for remat in flags.remats
        for number in flags.numbers
    ]
    for task in tasks:
        with context.Pool(1) as pool:
            (found,) = pool.starmap(measure, [task])
        for row in found:
            print(json.dumps(row), flush=True)
        rows += found
    print(tables.draw(rows))


def measure(
    platform: str, block: str, policy: str, remat: Remat, num_blocks: int
) -> list[tables.Row]:
    """Returns a row for the forward of a stage of blocks, and one for its backward."""
    import keras
    import tensorflow as tf

    import tfgpipe
    from tfgpipe import planner

    tfgpipe.make_logical_cpus(3)
    keras.config.set_dtype_policy(policy)
    make_one, shape, rows = BLOCKS[block]

    def make(x: Any) -> Any:
        for _ in range(num_blocks):
            x = make_one(x)
        return x

    inputs = keras.Input(shape)
    norm = keras.layers.LayerNormalization
    model = tfgpipe.PipelinedModel(
        keras.Model(inputs, norm()(make(norm()(inputs)))),
        num_stages=3,
        num_microbatches=2,
        partition=[1, num_blocks * NUM_LAYERS[block], 1],
        remat=remat,
    )
    model.compile("sgd", "mse")
    spec = tf.TensorSpec([2 * rows, *shape])
    report = tfgpipe.dry_run(model, batch=(spec, spec), platform=platform)
    compiled = {x.name: x.compiled for x in report.functions if x.device == 1}
    alone = keras.Model(inputs, make(inputs))
    layers = planner.read(alone).layers
    products = _product_bytes(alone, tf.TensorSpec([rows, *shape], alone.compute_dtype))
    traffic = [
        rows * sum(x.traffic.forward for x in layers),
        rows * sum(x.traffic.backward for x in layers),
    ]
    # A sum of gradients is read and written.
    trained = sum(x.weights.trained_bytes for x in layers)
    products[1] += 2 * trained
    if remat != "none":
        products[1] += products[0]
        traffic[1] += traffic[0]
    held = report.estimate.memory[1]
    planned = [0.0, held.workspace + held.recomputed]
    found = []
    for i, name in enumerate(("forward", "backward")):
        each = compiled[f"stage_{name}"]
        assert each is not None
        if each.error:
            raise SystemExit(f"{platform}, {block}, {name}: {each.error}")
        # Outputs are sums of gradients, which are elsewhere, and gradients of inputs.
        temp = each.temp_bytes + (each.output_bytes - trained if i else 0)
        row = {
            "platform": platform,
            "block": block,
            "policy": policy,
            "remat": remat,
            "blocks": num_blocks,
            "pass": name,
            "accessed": each.bytes_accessed / MIB,
            "products": products[i] / MIB,
            "unfused": traffic[i] / MIB,
            "left": (each.bytes_accessed - products[i]) / traffic[i],
            "temp": temp / MIB,
            "planned": planned[i] / MIB,
            "of planned": temp / planned[i] if i else "",
        }
        found.append(row)
    return found


def _product_bytes(model: keras.Model, spec: tf.TensorSpec) -> list[float]:
    """Returns what products of the forward and of the backward read and write."""
    import tensorflow as tf

    @tf.function(autograph=False)
    def gradients(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
        return tape.gradient(y, [x, *model.trainable_variables])

    totals = [0.0, 0.0]
    for op in gradients.get_concrete_function(spec).graph.get_operations():
        if op.type in PRODUCTS:
            tensors = [x for x in (*op.inputs, *op.outputs) if x.dtype.is_floating]
            size = sum(x.dtype.size * x.shape.num_elements() for x in tensors)
            totals[op.name.startswith("gradient_tape")] += size
    return totals


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
    "transformer": (_transformer, (512, WIDTH), 16),
    "convolution": (_convolution, (14, 14, WIDTH), 128),
}

NUM_LAYERS = {"transformer": 1, "convolution": 10}

if __name__ == "__main__":
    main()
