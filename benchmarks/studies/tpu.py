"""With 8 stages a TPU core does 0.22 of the FLOPs of plain Keras' step on one.

An SPMD pipeline compiled for TPUs that are not there: FLOPs and memory of a core.

    python -m benchmarks.studies.tpu --platforms tpu-v5e --stages 2 4 8

The train step (Adam, float32) of a transformer: an embedding, `--blocks` blocks of
`workloads`, a Dense layer over the vocabulary. Compiled by libtpu for one core of the
first platform, as plain Keras traces it, and for K cores of each with the blocks in an
`SPMDPipeline`; the extra `tfgpipe[compilers]` has the compiler. Nothing is run, so
there are no times.

`GFLOP` is what a core computes in a step, by XLA's count, which counts a loop once; the
loops compiled alone tell what to add for the other M + K - 2 rounds. `arguments` are
weights, slots and the batch; `temp` is all that is needed in between. `of plain`
are fractions of the step on one core, and `expected` is the fraction of its FLOPs that
recomputation (4/3) and idle rounds ((M + K - 1) / M) lead to.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import keras
import tensorflow as tf

import tfgpipe
from benchmarks import tables, workloads
from tfgpipe import spmd
from tfgpipe.accelerators import Compiled, Compiler

MIB = 2**20


def main(arguments: list[str] | None = None) -> None:
    """Compiles for all platforms and numbers of stages, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--platforms", nargs="+", default=["tpu-v5e", "tpu-v4", "tpu-v5p", "tpu-v6e"]
    )
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args(arguments)
    modules = {0: [_plain_step(options)]}
    modules |= {K: _partitioned(options, K) for K in options.stages}
    rows: list[tables.Row] = []
    plain: Compiled | None = None
    for name in options.platforms:
        with Compiler(name) as compiler:
            if plain is None:
                plain = _compiled(compiler, modules[0][0], 1)
                rows.append(_row(name, 1, plain, plain.flops, plain, 1.0))
            for K in options.stages:
                step, loops = (_compiled(compiler, hlo, K) for hlo in modules[K])
                M = options.microbatches
                flops = step.flops + (M + K - 2) * loops.flops
                expected = 4 / 3 * (M + K - 1) / (M * K)
                rows.append(_row(name, K, step, flops, plain, expected))
                print(rows[-1], file=sys.stderr, flush=True)
    print(tables.draw(rows))
    if options.json:
        tables.write_json(options.json, rows)


def _row(
    name: str, K: int, step: Compiled, flops: float, plain: Compiled, expected: float
) -> tables.Row:
    made = {kind: n for kind, n in step.collectives.items() if n}
    return {
        "platform": name,
        "K": K,
        "GFLOP": flops / 1e9,
        "of plain": flops / plain.flops,
        "expected": expected,
        "arguments MiB": step.argument_bytes / MIB,
        "of plain ": step.argument_bytes / plain.argument_bytes,
        "temp MiB": step.temp_bytes / MIB,
        "code MiB": step.code_bytes / MIB,
        "compiled s": step.seconds,
        "permutes": made.pop("collective-permute", 0),
        "other collectives": " ".join(f"{n} {kind}" for kind, n in made.items()),
    }


def _compiled(compiler: Compiler, hlo: bytes, num_partitions: int) -> Compiled:
    compiled = compiler.compile(hlo, num_partitions=num_partitions)
    if compiled.error:
        raise SystemExit(f"{compiler.platform.name}: {compiled.error}")
    return compiled


def _model(options: argparse.Namespace, **pipeline: Any) -> keras.Model:
    layers: list[keras.layers.Layer] = [
        workloads.EncoderBlock() for _ in range(options.blocks)
    ]
    if pipeline:
        layers = [tfgpipe.SPMDPipeline(layers, **pipeline)]
    model = keras.Sequential(
        [
            keras.Input((options.length,), dtype="int32"),
            keras.layers.Embedding(options.vocabulary, options.width),
            *layers,
            keras.layers.Dense(options.vocabulary),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    model.optimizer.build(model.trainable_variables)
    return model


def _batch(options: argparse.Namespace) -> tf.Tensor:
    return tf.zeros([options.batch, options.length], tf.int32)


def _plain_step(options: argparse.Namespace) -> bytes:
    model, x = _model(options), _batch(options)
    step = tf.function(
        lambda x, y: model.train_step((x, y)), autograph=False, jit_compile=True
    )
    return step.experimental_get_compiler_ir(x, x)(stage="hlo_serialized")


def _partitioned(options: argparse.Namespace, K: int) -> list[bytes]:
    model = _model(
        options,
        num_stages=K,
        num_microbatches=options.microbatches,
        partitioned=True,
    )
    (layer,) = (x for x in model.layers if isinstance(x, tfgpipe.SPMDPipeline))
    inputs = tf.zeros([options.batch, options.length, options.width])
    x = _batch(options)
    step = spmd.train_step_module(model, x, x)
    return [step.hlo, spmd.gradient_module(layer, inputs).hlo]


if __name__ == "__main__":
    main()
